"""Files that are whole or absent, whenever a run is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import torch

from specdec_core import ConfigError, Trainee

STATE, LOG, UNFINISHED = "state.pt", "log.jsonl", ".checkpoint-"


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """The path to write to in the block. What is there at its end replaces the file."""
    partial = file.with_name(f"{file.name}.partial")
    yield partial
    partial.replace(file)


def write_text(file: Path, text: str) -> None:
    with whole(file) as partial:
        partial.write_text(text, encoding="utf-8")


def write_state(folder: Path, state: dict[str, Any]) -> None:
    with whole(folder / STATE) as partial:
        torch.save(state, partial)


def read_state(folder: Path) -> dict[str, Any] | None:
    """None: there is none yet. Raises ConfigError if it is damaged."""
    file = folder / STATE
    if not file.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Begin again in another folder") from error
    return state


def write_checkpoint(folder: Path, trainee: Trainee) -> None:
    """Each file of it replaces the one before when it is whole."""
    for left in folder.glob(f"{UNFINISHED}*"):  # by a run that was killed
        rmtree(left)
    with TemporaryDirectory(prefix=UNFINISHED, dir=folder) as scratch:
        trainee.save(Path(scratch))
        for file in sorted(each for each in Path(scratch).rglob("*") if each.is_file()):
            to = folder / file.relative_to(scratch)
            to.parent.mkdir(parents=True, exist_ok=True)
            file.replace(to)


class Log:
    """One JSON object in each line of log.jsonl."""

    def __init__(self, folder: Path, step: int) -> None:
        """step: of the state that the run begins with: lines of later steps are forgotten, for they come again."""
        self._file = folder / LOG
        if self._file.exists():
            lines = [json.loads(line) for line in self._file.read_text(encoding="utf-8").splitlines() if _whole(line)]
            kept = [line for line in lines if line["step"] <= step and step > 0]
            write_text(self._file, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, **values: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def read(self) -> list[dict[str, Any]]:
        if not self._file.exists():
            return []
        return [json.loads(line) for line in self._file.read_text(encoding="utf-8").splitlines()]


def _whole(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
