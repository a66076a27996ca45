"""A file of token sequences: what a cache of outputs is saved as, and made from again."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
from attrs import define
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

SAVE_EVERY_S = 60.0

FORMAT = "specdec-suffix-cache-1"


class UnusableFileError(Exception):
    """Says why a file cannot be loaded, in words that follow its name."""


def save_sequences(path: Path, sequences: Sequence[np.ndarray]) -> None:
    """Write sequences of token ids. Whoever reads the file meanwhile, or after a crash, finds this one or the last one,
    whole. Raises OSError."""
    token_ids = np.concatenate([np.empty(0, np.int32), *sequences]).astype(np.int32)
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    described = {"format": FORMAT, "crc32": str(_checksum(token_ids, lengths))}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(save({"token_ids": token_ids, "lengths": lengths}, described))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_sequences(path: Path, vocab_size: int) -> list[np.ndarray]:
    """int32 each, in the order in which they were saved. Raises UnusableFileError."""
    try:
        with safe_open(path, "numpy") as file:
            if (file.metadata() or {}).get("format") != FORMAT:
                raise UnusableFileError("is no such cache, or one of another version")
            token_ids, lengths = file.get_tensor("token_ids"), file.get_tensor("lengths")
            checksum = file.metadata()["crc32"]
    except (SafetensorError, OSError, KeyError) as error:
        raise UnusableFileError(f"cannot be read: {error}") from error
    if str(_checksum(token_ids, lengths)) != checksum:
        raise UnusableFileError("is damaged: its checksum is another")
    if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise UnusableFileError(f"has token ids up to {token_ids.max()}, where the model's are below {vocab_size}")
    return np.split(token_ids, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _checksum(token_ids: np.ndarray, lengths: np.ndarray) -> int:
    return crc32(lengths.tobytes(), crc32(token_ids.tobytes()))


@define
class SavedCache:
    """The file that a cache lives on in; without a path, nothing happens."""

    path: Path | None
    _next_save_s: float = 0.0

    @classmethod
    def named(cls, path: str | Path | None) -> SavedCache:
        return cls(None if path is None else Path(path).expanduser(), time.monotonic() + SAVE_EVERY_S)

    def load(self, vocab_size: int) -> list[np.ndarray]:
        """Nothing if there is no file. One that is unusable causes a warning, and is not written to later."""
        if self.path is None or not self.path.exists():
            return []
        try:
            return load_sequences(self.path, vocab_size)
        except UnusableFileError as error:
            warnings.warn(
                f"suffix_decoding_cache_path={str(self.path)!r} {error}. The cache starts empty and will not be saved: "
                f"delete the file, or name another",
                stacklevel=2,
            )
            self.path = None
            return []

    def save_if_due(self, sequences: Callable[[], Sequence[np.ndarray]]) -> None:
        """At most once a minute, so that a crash costs no more than that."""
        if time.monotonic() >= self._next_save_s:
            self.save(sequences())

    def save(self, sequences: Sequence[np.ndarray]) -> None:
        """A file that cannot be written causes a warning."""
        self._next_save_s = time.monotonic() + SAVE_EVERY_S
        if self.path is None:
            return
        try:
            save_sequences(self.path, sequences)
        except OSError as error:
            warnings.warn(f"suffix_decoding_cache_path={str(self.path)!r} cannot be saved: {error}", stacklevel=2)
