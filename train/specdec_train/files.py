"""Files of a training run. The state and each checkpoint file are written atomically, even if the run is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

import torch
from filelock import FileLock, Timeout

from specdec_core import ConfigError, Trainee
from specdec_train.settings import LOCK

STATE, LOG, UNFINISHED = "state.pt", "log.jsonl", ".checkpoint-"
WEIGHTS = (".safetensors", ".bin", ".pt")
KEYS = frozenset({"checked", "step", "num_tokens", "seconds", "trainee", "optimizers"})
"""Keys of a run's saved state."""


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a folder's lock file during the `with` block. Raises ConfigError if another training run holds it."""
    try:
        with FileLock(folder / LOCK, timeout=0):
            yield
    except Timeout as error:
        raise ConfigError(f"another run is writing to {str(folder)!r}: wait for its end, or name another") from error


@contextmanager
def replace(file: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. At the end of the `with` block, the written file replaces `file`. Raises
    ConfigError if that fails, as on a full disk."""
    partial = file.with_name(f"{file.name}.partial")
    with writing(file):
        try:
            yield partial
            partial.replace(file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turn exceptions of the `with` block, which writes `file`, into ConfigError."""
    try:
        yield
    except Exception as error:  # torch and safetensors have exceptions of their own for a full disk
        raise ConfigError(
            f"{str(file)!r} cannot be written: {error}. Make room on the disk; --resume then continues the run"
        ) from error


def write_text(file: Path, text: str) -> None:
    with replace(file) as partial:
        partial.write_text(text, encoding="utf-8")


def write_state(folder: Path, state: dict[str, Any]) -> None:
    with replace(folder / STATE) as partial:
        torch.save(state, partial)


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the training state that was saved in `folder`. None if no state was saved yet. Raises ConfigError if the
    file is damaged or is not the state of a training run."""
    file = folder / STATE
    if not file.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        if not state.keys() >= KEYS:
            raise ValueError(f"it lacks {', '.join(sorted(KEYS - state.keys()))}")
    except Exception as error:  # torch.load raises many types for broken files
        why = shorten(f"{type(error).__name__}: {error}".removesuffix(": "), 200, placeholder=" ...")
        raise ConfigError(
            f"{file} is not the state of a run, or damaged ({why}): start over in another folder"
        ) from error
    return state


def write_checkpoint(folder: Path, trainee: Trainee) -> None:
    """Save the checkpoint of a draft model in training to `folder`. Each file is replaced atomically."""
    for left in folder.glob(f"{UNFINISHED}*"):  # left by a run that was killed
        if left.is_dir() and not left.is_symlink():
            rmtree(left)
    with TemporaryDirectory(prefix=UNFINISHED, dir=folder) as scratch:
        with writing(folder):
            trainee.save(Path(scratch))
        for file in sorted(each for each in Path(scratch).rglob("*") if each.is_file()):
            to = folder / file.relative_to(scratch)
            to.parent.mkdir(parents=True, exist_ok=True)
            file.chmod(0o644)  # safetensors' are readable for their owner alone
            file.replace(to)


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder has the weights of a checkpoint."""
    return any(file.suffix in WEIGHTS and file.name != STATE for file in folder.iterdir())


class Log:
    """The log file of a training run, log.jsonl, with one JSON object per line."""

    def __init__(self, folder: Path, step: int) -> None:
        """Open the log of a run that starts or resumes at `step`. Damaged lines are dropped, and so are lines of later
        steps, which a resumed run repeats. If step is 0, the run is new and all lines are dropped."""
        self._file = folder / LOG
        if self._file.exists():
            lines = map(_read, self._file.read_text(encoding="utf-8", errors="replace").splitlines())
            kept = [line for line in lines if line is not None and line["step"] <= step and step > 0]
            write_text(self._file, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, **values: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def read(self) -> list[dict[str, Any]]:
        if not self._file.exists():
            return []
        return [json.loads(line) for line in self._file.read_text(encoding="utf-8").splitlines()]


def _read(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None
