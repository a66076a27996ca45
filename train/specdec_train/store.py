"""Stores the target's hidden states on disk: safetensors shards, and an index that names the target, the kinds of
hidden states ("taps") and a hash of the texts."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from specdec_core import ConfigError, TrainingTarget
from specdec_train.batches import collate
from specdec_train.data import Text, Window, fingerprint
from specdec_train.features import features_of, weights_fingerprint
from specdec_train.files import replace, write_text
from specdec_train.settings import LOCK, make_folder

INDEX = "index.json"
TOKENS_PER_SHARD = 1 << 16


@define
class FeatureStore:
    """The target's hidden states for the training texts, stored in a folder. They can be read window by window."""

    folder: Path
    taps: tuple[str, ...]
    shards: list[tuple[int, int]]  # first and one past the last text of each
    starts: list[int]  # first row of each text in its shard
    _opened: dict[int, Any] = field(factory=dict)

    def read(self, windows: Sequence[Window]) -> dict[str, torch.Tensor]:
        """Return hidden states, {tap: [len(windows), length of the longest window, width]}, padded with zeros."""
        found = [self._read_one(window) for window in windows]
        return {
            tap: torch.nn.utils.rnn.pad_sequence([one[tap] for one in found], batch_first=True) for tap in self.taps
        }

    def _read_one(self, window: Window) -> dict[str, torch.Tensor]:
        shard = bisect_right(self.shards, window.row, key=lambda shard: shard[0]) - 1
        if shard not in self._opened:
            self._opened[shard] = safe_open(self.folder / shard_name(shard), "pt").__enter__()
        start, stop = (self.starts[window.row] + place for place in (window.start, window.stop))
        return {tap: self._opened[shard].get_slice(tap)[start:stop] for tap in self.taps}


def open_store(
    folder: Path,
    texts: Sequence[Text],
    target: TrainingTarget,
    taps: Sequence[str],
    batch: int,
    check: Callable[[], None],
) -> FeatureStore:
    """Open a folder with the hidden states of all texts. Shards that are missing in the folder are computed first.

    taps: names of hidden states: "input.N" (those that enter layer N) or "final" (those after the final norm).
    batch: number of texts per forward pass of the target.
    check: called before each shard; raises KeyboardInterrupt if the run was interrupted.

    Raises ConfigError if the folder was made with other texts, another target or other taps.
    """
    wanted = {
        "target": target.info.model,
        "weights": weights_fingerprint(target),
        "dtype": str(target.info.dtype),
        "taps": list(taps),
        "texts": fingerprint(texts),
    }
    if folder.exists() and not (folder.is_dir() and _is_of_a_store(folder)):
        raise ConfigError(f"--features {str(folder)!r} is not a folder of stored hidden states: name another folder")
    make_folder("--features", folder)
    description, lengths = folder / INDEX, [len(text.token_ids) for text in texts]
    shards, starts = _layout(lengths)
    with FileLock(folder / LOCK):  # other runs with the same folder wait until it is complete
        if description.exists():
            _check(description, wanted)
        else:
            write_text(description, json.dumps(wanted))
        for i, (first, last) in enumerate(tqdm(shards, desc="features", unit="shard")):
            check()
            if not (folder / shard_name(i)).exists():
                _write_shard(folder / shard_name(i), texts[first:last], target, taps, batch)
    return FeatureStore(folder, tuple(taps), shards, starts)


def _is_of_a_store(folder: Path) -> bool:
    return (folder / INDEX).exists() or all(file.name == LOCK for file in folder.iterdir())


def shard_name(i: int) -> str:
    return f"features-{i:05d}.safetensors"


def _check(description: Path, wanted: dict[str, Any]) -> None:
    try:
        found = json.loads(description.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{description} cannot be read: {error}. Delete the folder, or name another") from error
    differing = [key for key, value in wanted.items() if not isinstance(found, dict) or found.get(key) != value]
    if differing:
        raise ConfigError(
            f"--features {str(description.parent)!r} was computed with other {' and '.join(differing)}: delete the "
            f"folder, or name another"
        )


def _layout(lengths: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    shards, starts, first, size = [], [], 0, 0
    for row, length in enumerate(lengths):
        if size and size + length > TOKENS_PER_SHARD:
            shards.append((first, row))
            first, size = row, 0
        starts.append(size)
        size += length
    return [*shards, (first, len(lengths))], starts


def _write_shard(file: Path, texts: Sequence[Text], target: TrainingTarget, taps: Sequence[str], batch: int) -> None:
    rows: dict[int, dict[str, torch.Tensor]] = {}
    by_length = sorted(range(len(texts)), key=lambda row: len(texts[row].token_ids))
    for start in range(0, len(by_length), batch):
        part = by_length[start : start + batch]
        token_ids, _ = collate([texts[row] for row in part], target.info.device)
        found = features_of(target, token_ids, taps)
        for i, row in enumerate(part):
            rows[row] = {tap: found[tap][i, : len(texts[row].token_ids)].cpu() for tap in taps}
    with replace(file) as partial:
        save_file({tap: torch.cat([rows[row][tap] for row in range(len(texts))]) for tap in taps}, partial)
