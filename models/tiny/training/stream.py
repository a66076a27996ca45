"""The corpus as one stream of token ids, in rows in which edit documents stay whole, and marks on the tokens that a
copy of the edited code would get wrong."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer
from tqdm import tqdm

from .corpus import Document
from .data import UNIT, marks_of
from .edits import RESULT

END_OF_TEXT = "<|endoftext|>"
LINES, WORDS = re.compile(r".*\n|.+"), re.compile(r"\w+|\s+|[^\w\s]")
Tokens = tuple[np.ndarray, np.ndarray]
"""Token ids, uint16, and a mark for each, bool."""


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


def marks(document: Document, encoding: Encoding) -> np.ndarray:
    """Return which tokens of an edit document the code before the edit does not predict, bool [number of tokens]."""
    marked = np.zeros(len(document.text) + 1, bool)
    head, separator, after = document.text.partition(RESULT)
    start = len(head) + len(separator)
    for begin, end in departures(head.partition("\n")[2], after):
        marked[start + begin : start + end] = True
    before = np.concatenate([[0], marked.cumsum()])
    begins, ends = np.array(encoding.offsets).T
    found: np.ndarray = before[ends] > before[begins]
    return found


def lay_out(edits: list[Tokens], other: Tokens) -> Tokens:
    """Return the stream: rows of UNIT tokens. Each begins with whole edits, as many as keep their share of the stream,
    and goes on with the other text, which is cut at the rows' ends. Once that is used up, edits follow each other, and
    rows may cut them.

    edits: edit documents of at most UNIT tokens; the last ones come first.
    """
    left = list(edits)
    num_edited = sum(len(ids) for ids, _ in edits)
    share = num_edited / (num_edited + len(other[0]))
    rows: list[Tokens] = []
    num_tokens, num_placed, taken = 0, 0, 0
    while left or taken < len(other[0]):
        room = UNIT
        while left and len(left[-1][0]) <= room and (num_placed <= share * num_tokens or taken >= len(other[0])):
            rows.append(left.pop())
            room -= len(rows[-1][0])
            num_placed += len(rows[-1][0])
        rows.append((other[0][taken : taken + room], other[1][taken : taken + room]))
        taken += room
        num_tokens += UNIT
    ids, marked = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return ids, marked


def encode(tokenizer: Tokenizer, documents: list[Document], path: Path) -> int:
    """Write the token ids of all documents, with an end-of-text token after each, to the ``.npy`` file ``path``
    (uint16), and the marks of edit documents to the file that `marks_of` names (bool). Returns the number of ids."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    edits, others = [], []
    for start in tqdm(range(0, len(documents), 256), desc=f"encode {path.stem}"):
        batch = documents[start : start + 256]
        for document, encoding in zip(batch, tokenizer.encode_batch([each.text for each in batch]), strict=True):
            ids = np.array([*encoding.ids, end], np.uint16)
            if document.source == "edit" and len(ids) <= UNIT:
                edits.append((ids, np.append(marks(document, encoding), False)))
            else:
                others.append((ids, np.zeros(len(ids), bool)))
    ids, marked = (np.concatenate(parts) for parts in zip(*others, strict=True))
    ids, marked = lay_out(edits, (ids, marked))
    for file, array in ((marks_of(path), marked), (path, ids)):
        partial = file.with_suffix(".partial.npy")
        np.save(partial, array)
        partial.replace(file)
    return len(ids)
