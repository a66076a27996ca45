"""The corpus as one stream of token ids, in rows in which edit documents stay whole, and the weight of each token's
loss."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer
from tqdm import tqdm

from .corpus import Document
from .data import weights_of
from .edits import RESULT

END_OF_TEXT = "<|endoftext|>"
LINES, WORDS = re.compile(r".*\n|.+"), re.compile(r"\w+|\s+|[^\w\s]")
ROW = 1024
"""Tokens of a row, the shorter of the lengths of training sequences (train.py)."""
RENAMED = re.compile(r"# Task: rename `(\w+)`")
DEPARTURE = 4
"""Weight of a token at which an edit departs from the code before it, and of an old name that a rename leaves.
There are few of them, and without more weight a model of this size learns to copy, and not to edit."""
Tokens = tuple[np.ndarray, np.ndarray]
"""Token ids, uint16, and the weight of each one's loss, uint8."""


def departures(before: str, after: str, parts: tuple[re.Pattern[str], ...] = (LINES, WORDS)) -> list[tuple[int, int]]:
    """Return the spans (start, end) of characters of ``after`` at which it departs from ``before``: what was inserted,
    and the first character after an insertion or a deletion.

    parts: what the texts are compared by, from long to short.
    """
    old, new = parts[0].findall(before), parts[0].findall(after)
    spans, at = [], 0
    for kind, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        text = "".join(new[k:m])
        if kind == "replace" and parts[1:]:
            spans += [(at + s, at + e) for s, e in departures("".join(old[i:j]), text, parts[1:])]
        elif kind != "equal":
            spans.append((at, at + len(text) + 1))
        at += len(text)
    return spans


def weights(document: Document, encoding: Encoding) -> np.ndarray:
    """Return the weight of each token of an edit document, uint8 [number of tokens]: 0 before the result, where it is
    code like any other or the words of a drill, which nothing predicts; DEPARTURE where the code before the edit does
    not predict a token of the result, or where it has the old name of a rename; and 1 elsewhere."""
    of_chars = np.ones(len(document.text) + 1, np.uint8)
    head, separator, after = document.text.partition(RESULT)
    start = len(head) + len(separator)
    of_chars[:start] = 0
    for begin, end in departures(head.partition("\n")[2], after):
        of_chars[start + begin : start + end] = DEPARTURE
    for left in re.finditer(rf"(?<![A-Za-z]){name[1]}", after) if (name := RENAMED.match(head)) else ():
        of_chars[start + left.start() : start + left.end()] = DEPARTURE
    return np.array([of_chars[begin:end].max() for begin, end in encoding.offsets], np.uint8)


def lay_out(edits: list[Tokens], other: Tokens) -> Tokens:
    """Return the stream: rows of ROW tokens. Each begins with whole edits, as many as keep their share of the stream,
    and goes on with the other text, which is cut at the rows' ends. Once that is used up, edits follow each other, and
    rows may cut them.

    edits: edit documents of at most ROW tokens; the last ones come first.
    """
    left = list(edits)
    num_edited = sum(len(ids) for ids, _ in edits)
    share = num_edited / (num_edited + len(other[0]))
    rows: list[Tokens] = []
    num_tokens, num_placed, taken = 0, 0, 0
    while left or taken < len(other[0]):
        room = ROW
        while left and len(left[-1][0]) <= room and (num_placed <= share * num_tokens or taken >= len(other[0])):
            rows.append(left.pop())
            room -= len(rows[-1][0])
            num_placed += len(rows[-1][0])
        rows.append((other[0][taken : taken + room], other[1][taken : taken + room]))
        taken += room
        num_tokens += ROW
    ids, each = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return ids, each


def encode(tokenizer: Tokenizer, documents: list[Document], path: Path) -> int:
    """Write the token ids of all documents, with an end-of-text token after each, to the ``.npy`` file ``path``
    (uint16), and the weight of each to the file that `weights_of` names (uint8). Returns the number of ids."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    edits, others = [], []
    for start in tqdm(range(0, len(documents), 256), desc=f"encode {path.stem}"):
        batch = documents[start : start + 256]
        for document, encoding in zip(batch, tokenizer.encode_batch([each.text for each in batch]), strict=True):
            ids = np.array([*encoding.ids, end], np.uint16)
            if document.source in ("edit", "drill") and len(ids) <= ROW:
                edits.append((ids, np.append(weights(document, encoding), np.uint8(1))))
            else:
                others.append((ids, np.ones(len(ids), np.uint8)))
    ids, each = (np.concatenate(parts) for parts in zip(*others, strict=True))
    ids, each = lay_out(edits, (ids, each))
    for file, array in ((weights_of(path), each), (path, ids)):
        partial = file.with_suffix(".partial.npy")
        np.save(partial, array)
        partial.replace(file)
    return len(ids)
