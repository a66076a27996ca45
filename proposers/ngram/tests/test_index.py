"""Tests of the n-gram index alone. They include hash collisions, and mutation tests, which break the index's source
code on purpose to see whether the tests notice."""

from __future__ import annotations

import ctypes
import random
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from obvious_ngram import reference

from specdec_proposer_ngram import index

SOURCE = Path(index.__file__).read_text()
IMPORTS = (
    "from specdec_core import compiled\nfrom specdec_proposer_ngram.compiled import array_at, jit_inner, prefetch\n"
)


def array_at(address: int, size: int, dtype: type) -> np.ndarray:
    data = (ctypes.c_char * (int(size) * np.dtype(dtype).itemsize)).from_address(int(address))
    return np.frombuffer(data, dtype)


def in_python(old: str, new: str) -> SimpleNamespace:
    """Return the functions of the module `index`, not compiled, after replacing `old` by `new` in the module's source
    code."""
    assert IMPORTS in SOURCE
    assert old in SOURCE
    names = {
        "array_at": array_at,
        "compiled": lambda signature, nogil: lambda function: function,
        "jit_inner": lambda function: function,
        "prefetch": lambda array, i: None,
    }
    exec(SOURCE.replace(IMPORTS, "").replace(old, new), names)
    return SimpleNamespace(**names)


def draft(module, text, cuts, shortest, longest, match, budget) -> list[list[int]]:
    """Append a text's tokens to an index in parts: up to cuts[0], then up to cuts[1], and so on. Returns the drafts
    after each part. The hash table has one slot more than the n-grams can fill.

    module: the module `index` or the result of `in_python`.
    """
    num_slots = len(text) * (longest - shortest + 1) + 1
    slots, tokens = np.zeros(num_slots, dtype=np.uint64), np.zeros(len(text), dtype=np.uint32)
    states = np.array([[slots.ctypes.data, num_slots, tokens.ctypes.data, len(text), 0, 0]])
    found, before = [], 0
    for cut in cuts:
        token_ids, parents, counts = np.zeros(budget, np.int64), np.zeros(budget, np.int32), np.zeros(1, np.int64)
        given = np.array(text[before:cut], dtype=np.int64), np.array([cut - before]), np.array([budget])
        numbers = (shortest, longest, match == "last")
        module.draft(states, np.array([0]), *given, *numbers, token_ids, parents, counts)
        found.append(token_ids[: counts[0]].tolist())
        before = cut
    return found


def first_difference(module, *, longest_text: int = 6) -> object:
    """Return the first case in which the drafts of `module` differ from the reference implementation's: the text, the
    options and the drafts. Returns None if there is none.

    The function tries all texts of two distinct tokens with up to longest_text tokens, and some longer texts. It
    appends each text in two parts, and then drafts once more without new tokens.
    """
    texts = [text for length in range(1, longest_text + 1) for text in product((0, 1), repeat=length)]
    chance = random.Random(0)
    texts += [tuple(chance.choices((0, 1, 2), weights=(4, 2, 1), k=40)) for _ in range(4)]
    for text, (shortest, longest), match in product(texts, [(1, 1), (1, 3), (2, 3), (3, 3)], ["first", "last"]):
        cuts = [len(text) // 2, len(text), len(text)]
        expected = [reference(list(text[:cut]), shortest, longest, match, 4) for cut in cuts]
        try:
            found = draft(module, text, cuts, shortest, longest, match, 4)
        except IndexError as error:
            found = error
        if found != expected:
            return text, shortest, longest, match, found
    return None


def test_all_small_texts_equal_the_reference():
    assert first_difference(index, longest_text=9) is None


@np.errstate(over="ignore")  # hashes do
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("NUM_ENDS = 128", "NUM_ENDS = 3"),
        (
            "return np.int64(((hashed & LOW) * np.uint64(num_slots)) >> HALF)",
            "return num_slots - 1",
        ),  # all in one place
    ],
)
def test_it_is_the_same_whatever_the_rounds_and_the_collisions(old, new):
    assert first_difference(in_python(old, new)) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rows_of_ends[k], ends[k] = row, state[NUM_TOKENS]", "rows_of_ends[k], ends[k] = row, state[NUM_TOKENS] - 1"),
        ("tokens[state[NUM_TOKENS]] = new_tokens[first + i]", "tokens[state[NUM_TOKENS]] = new_tokens[first]"),
        ("            if most_recent:", "            if not most_recent:"),
        ("            if most_recent:", "            if True:"),
        ("            if start == 0:", "            if before > 0:"),  # the shortest match
        ("            if start == 0:", "            if before > start:"),  # the most recent, of any length
        ("if start == 0:\n                start = before", "start = before"),  # what the shortest has, or nothing
        (">> END_BITS == 0:", ">> END_BITS >= 0:"),  # trusts the first slot
        ("slots[i] = (hashed & ~END) | np.uint64(end)\n    return 0", "return 0"),  # forgets what is new
        ("slots[i] = (hashed & ~END) | np.uint64(end)\n            return", "return"),  # never replaces
        ("slots_of(states[row]), 0", "slots_of(states[row]), states[row, START]"),  # goes on from where it was
        ("if n >= shortest:", "if n > shortest:"),
        ("range(1, min(end, longest) + 1)", "range(1, min(end, longest))"),
        ("range(min(ends[k], longest), shortest - 1, -1)", "range(min(ends[k], longest), shortest, -1)"),
        ("hashed = with_token(hashed, tokens[end - n])", "hashed = with_token(NO_TOKENS, tokens[end - n])"),
        ("np.uint64(token)) * NO_TOKENS", "np.uint64(0)) * NO_TOKENS"),  # counts tokens only
        ("tokens[i], depth - 1", "tokens[i - 1], depth - 1"),
        ("i + 1 if i + 1 < state[NUM_TOKENS] else state[START]", "i + 1"),  # does not go round
    ],
)
@np.errstate(over="ignore")
def test_a_wrong_index_is_caught(old, new):
    assert first_difference(in_python(old, new)) is not None
