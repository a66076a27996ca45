"""Saves the cached outputs to a file of token sequences, and loads them again."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from functools import partial
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import numpy as np
from attrs import define, field
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

SAVE_EVERY_S = 60.0

FORMAT = "specdec-suffix-cache-1"


class UnusableFileError(Exception):
    """A cache file cannot be loaded. The message is a predicate such as "is damaged". Callers put the file's name
    before it."""


Save = Callable[[Sequence[np.ndarray]], None]


@contextmanager
def sole_writer(path: Path) -> Iterator[Save]:
    """Lock a cache file against other writers, and yield a function that replaces the file's contents by the given
    sequences of token ids.

    The lock waits until no other process or thread writes to the file. The replacement is atomic: readers get the old
    file or the new one, even if the process is killed. Raises OSError if the file cannot be locked or written.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.partial")
    with _locked(unfinished) as file:
        try:
            yield partial(_replace, path, unfinished, file)
        finally:
            if _is_at(unfinished, file):  # else it took the place of path, and the name may be another writer's
                unfinished.unlink()


def save_sequences(path: Path, sequences: Sequence[np.ndarray]) -> None:
    """Replace the file's contents by these sequences of token ids. Raises OSError if the file cannot be written."""
    with sole_writer(path) as save:
        save(sequences)


def _replace(path: Path, unfinished: Path, file: BinaryIO, sequences: Sequence[np.ndarray]) -> None:
    token_ids = np.concatenate([np.empty(0, np.int32), *sequences]).astype(np.int32)
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    described = {"format": FORMAT, "crc32": str(_checksum(token_ids, lengths))}
    file.truncate(0)  # what a process that was killed had written
    file.write(to_bytes({"token_ids": token_ids, "lengths": lengths}, described))
    file.flush()
    if path.exists():
        unfinished.chmod(path.stat().st_mode & 0o777)
    unfinished.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file and lock it; the lock ends with the context. The file is created if it does not exist, and its
    content is kept. If the process is killed, the system unlocks the file. Raises OSError, also on a file system
    without locks."""
    while True:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
            flock(file, LOCK_EX)
            if _is_at(path, file):
                yield file
                return
        # While this one waited, the file became another's cache, or was removed.


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def load_sequences(path: Path, vocab_size: int) -> list[np.ndarray]:
    """Return the file's sequences of token ids, int32 arrays, in the order in which they were saved.

    Raises UnusableFileError if the file is damaged or has a token id that is not below vocab_size.
    """
    try:
        with safe_open(path, "numpy") as file:
            if (file.metadata() or {}).get("format") != FORMAT:
                raise UnusableFileError("is not a suffix cache, or has another format version")
            token_ids, lengths = file.get_tensor("token_ids"), file.get_tensor("lengths")
            checksum = file.metadata()["crc32"]
    except (SafetensorError, OSError, KeyError) as error:
        raise UnusableFileError(f"cannot be read: {error}") from error
    if token_ids.dtype != np.int32 or lengths.dtype != np.int64 or token_ids.ndim != 1 or lengths.ndim != 1:
        raise UnusableFileError("has tensors of other types than a suffix cache")
    if str(_checksum(token_ids, lengths)) != checksum:
        raise UnusableFileError("is damaged: its checksum does not match")
    if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise UnusableFileError(f"has token ids up to {token_ids.max()}, where the model's are below {vocab_size}")
    if (lengths < 0).any() or lengths.sum() != len(token_ids):
        raise UnusableFileError(f"has lengths that do not add up to its {len(token_ids)} tokens")
    return np.split(token_ids, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _checksum(token_ids: np.ndarray, lengths: np.ndarray) -> int:
    return crc32(lengths.tobytes(), crc32(token_ids.tobytes()))


@define
class SavedCache:
    """The cache file that outputs are loaded from and appended to. If `path` is None, there is no file: `load` returns
    [], and the other methods do nothing.

    Several engines may share a file, in one process or in several: each appends its new outputs to the file's current
    contents.

    most: largest number of sequences in the file, and of unsaved sequences in memory. The oldest are dropped. A file
        that already has more sequences does not shrink.
    """

    path: Path | None
    vocab_size: int
    most: int
    _new: list[np.ndarray] = field(factory=list, init=False)
    _next_save_s: float = field(init=False, factory=lambda: time.monotonic() + SAVE_EVERY_S)

    def load(self) -> list[np.ndarray]:
        """Return the file's sequences of token ids, or [] if there is no file. An unusable file causes a warning; the
        result is then [], and the file is neither read nor written from then on."""
        if self.path is None or not self.path.exists():
            return []
        try:
            return load_sequences(self.path, self.vocab_size)
        except UnusableFileError as error:
            warnings.warn(
                f"suffix_decoding_cache_path={str(self.path)!r} {error}. The file is neither used nor written to, and "
                f"unsaved outputs will be lost: delete the file, or name another",
                stacklevel=2,
            )
            self.path = None
            return []

    def add(self, token_ids: np.ndarray) -> None:
        """Queue an output, a sequence of token ids, to be saved. If the last save was at least SAVE_EVERY_S seconds
        ago, save the queue now."""
        if self.path is None or not len(token_ids):
            return
        self._new.append(token_ids.astype(np.int32))
        del self._new[: -self.most]
        if time.monotonic() >= self._next_save_s:
            self.save()

    def save(self) -> None:
        """Append the queued outputs to the file. If the file cannot be written, a warning is given and the outputs stay
        queued."""
        self._next_save_s = time.monotonic() + SAVE_EVERY_S
        if self.path is None or not self._new:
            return
        try:
            with sole_writer(self.path) as save:
                before = self.load()
                if self.path is not None:
                    save([*before, *self._new][-max(self.most, len(before)) :])
                    self._new.clear()
        except OSError as error:
            warnings.warn(f"suffix_decoding_cache_path={str(self.path)!r} cannot be saved: {error}", stacklevel=2)
