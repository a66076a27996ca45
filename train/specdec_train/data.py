"""Training texts as token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from specdec_core import ConfigError, check_text, shown

SHORTEST = 4
"""Shortest training text in tokens. In shorter ones, a draft head trained over several steps has no label for the later
steps."""
LARGEST_ID = int(np.iinfo(np.int32).max)


@frozen(eq=False)
class Text:
    """A tokenized training text with its loss mask."""

    token_ids: np.ndarray  # int32 [length]
    counts: np.ndarray  # bool [length]: loss mask, True where the token is a label

    def part(self, start: int, stop: int) -> Text:
        return Text(self.token_ids[start:stop], self.counts[start:stop])

    @property
    def has_labels(self) -> bool:
        """Whether it has at least SHORTEST tokens, and the loss mask is True for a token after its second one."""
        return len(self.token_ids) >= SHORTEST and bool(self.counts[2:].any())


@frozen
class Window:
    """The tokens from `start` to `stop` of a training text."""

    row: int  # index of the text
    start: int
    stop: int


def read_texts(paths: Iterable[Path], tokenizer: Any, vocab_size: int) -> list[Text]:
    """Read and tokenize all texts in files and folders.

    tokenizer: the target's tokenizer. None if the target has no tokenizer; only .npy files of token ids can then be
        read.
    vocab_size: number of the target's token ids.

    Raises ConfigError if a file cannot be read or has token ids that the target lacks.
    """
    texts: list[Text] = []
    for file in (file for path in paths for file in files_in(path)):
        read = [*_read(file, tokenizer)]
        highest = max((int(text.token_ids.max()) for text in read if len(text.token_ids)), default=0)
        if highest >= vocab_size:
            raise ConfigError(
                f"data {str(file)!r} has the token id {highest}, and the target has {vocab_size} tokens: tokenize "
                f"it with the target's tokenizer"
            )
        texts += read
    return texts


def cut(texts: Iterable[Text], length: int) -> list[Text]:
    """Split texts into pieces of at most `length` tokens. Pieces without labels are dropped."""
    pieces = (text.part(start, start + length) for text in texts for start in range(0, len(text.token_ids), length))
    return [piece for piece in pieces if piece.has_labels]


def windows(texts: Sequence[Text], length: int | None) -> list[Window]:
    """Split texts into windows of at most `length` tokens; None: a window for each text. Windows without labels are
    dropped. Raises ConfigError if none is left."""
    found = (
        Window(row, start, min(start + (length or size), size))
        for row, size in enumerate(len(text.token_ids) for text in texts)
        for start in range(0, size, length or size)
    )
    kept = [window for window in found if texts[window.row].part(window.start, window.stop).has_labels]
    if not kept:
        raise ConfigError(f"window={length} splits the texts such that no part has a label: give more tokens")
    return kept


def fingerprint(texts: Sequence[Text]) -> str:
    """Return a hash of all token ids and loss masks, which shows whether two runs have the same data."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(np.int64(len(text.token_ids)).tobytes() + text.token_ids.tobytes() + text.counts.tobytes())
    return digest.hexdigest()


def token_counts(texts: Sequence[Text], vocab_size: int) -> np.ndarray:
    """Count how often each token id occurs where the loss mask is True. Returns int64 [vocab]."""
    learned = [text.token_ids[text.counts] for text in texts]
    return np.bincount(np.concatenate(learned), minlength=vocab_size)


def files_in(path: Path) -> list[Path]:
    """Return the file, or all visible files below the folder. Raises ConfigError if the path does not exist or the
    folder has no visible file."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"data {str(path)!r} does not exist: name files or folders")
    found = sorted(file for file in path.rglob("*") if file.is_file())
    visible = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not visible:
        raise ConfigError(f"data {str(path)!r} is an empty folder: name one with texts")
    return visible


def _read(file: Path, tokenizer: Any) -> Iterator[Text]:
    if file.suffix.lower() == ".npy":
        yield from _of_array(file)
        return
    if tokenizer is None:
        raise ConfigError(f"data {str(file)!r} is text, and the target has no tokenizer: give .npy files of token ids")
    try:
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data {str(file)!r} is not UTF-8 text: byte {error.start}") from error
    if file.suffix.lower() != ".jsonl":
        yield _tokenize(tokenizer, content)
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield _of_line(tokenizer, line, f"data {str(file)!r}, line {number}")


def _of_line(tokenizer: Any, line: str, where: str) -> Text:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is {shown(line, 60)}, which is not JSON") from error
    keys = ("text",) if isinstance(found, dict) and "text" in found else ("prompt", "completion")
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in keys):
        raise ConfigError(
            f"{where} is {shown(line, 60)}: give an object with a text, or with a prompt and a completion"
        )
    for key in keys:
        check_text(found[key], f"{where} has a {key} that")
    if keys == ("text",):
        return _tokenize(tokenizer, found["text"])
    return join(_tokenize(tokenizer, found["prompt"]).token_ids, _ids(tokenizer, found["completion"], special=False))


def join(prompt: np.ndarray, completion: np.ndarray) -> Text:
    """Concatenate a prompt and a completion to one text. Its loss mask is True for the completion only."""
    counts = np.arange(len(prompt) + len(completion)) >= len(prompt)
    return Text(np.concatenate([prompt, completion]), counts)


def _of_array(file: Path) -> Iterator[Text]:
    try:
        with file.open("rb") as opened:
            array = np.lib.format.read_array(opened, allow_pickle=False)
    except (OSError, ValueError, MemoryError) as error:
        raise ConfigError(f"data {str(file)!r} cannot be read: {error}") from error
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        raise ConfigError(
            f"data {str(file)!r} is {array.dtype} {list(array.shape)}: give integers [tokens] or [texts, tokens], with "
            f"negative numbers as padding"
        )
    if array.size and array.max() > LARGEST_ID:
        raise ConfigError(f"data {str(file)!r} has {array.max()}, which is not a token id: give 0 to {LARGEST_ID}")
    for row in np.atleast_2d(array):
        ids = row[row >= 0].astype(np.int32)
        yield Text(ids, np.ones(len(ids), dtype=bool))


def _tokenize(tokenizer: Any, text: str) -> Text:
    ids = _ids(tokenizer, text, special=True)
    return Text(ids, np.ones(len(ids), dtype=bool))


def _ids(tokenizer: Any, text: str, *, special: bool) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"], dtype=np.int32)
