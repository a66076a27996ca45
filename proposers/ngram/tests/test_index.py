"""The index by itself: where slots are few and marks say nothing, and with faults made on purpose."""

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
from specdec_proposer_ngram.compiled import compiled

SOURCE = Path(index.__file__).read_text()
IMPORT = "from specdec_proposer_ngram.compiled import array_at, compiled, inner, prefetch\n"


def array_at(address: int, size: int, dtype: type) -> np.ndarray:
    data = (ctypes.c_char * (int(size) * np.dtype(dtype).itemsize)).from_address(int(address))
    return np.frombuffer(data, dtype)


def in_python(old: str, new: str) -> SimpleNamespace:
    """The module, not compiled, with something else in one place."""
    assert IMPORT in SOURCE
    assert old in SOURCE
    names = {
        "array_at": array_at,
        "compiled": lambda signature: lambda function: function,
        "inner": lambda function: function,
        "prefetch": lambda array, i: None,
    }
    exec(SOURCE.replace(IMPORT, "").replace(old, new), names)
    return SimpleNamespace(**names)


def draft(module, text, cuts, shortest, longest, match, budget, *, is_marked: bool) -> list[list[int]]:
    """What is drafted once the text has come to each of the cuts. Its memory is no larger than it must be."""
    capacity = len(text)
    memory = np.zeros(capacity * (1 + module.SLOTS_PER_TOKEN), dtype=np.uint32)
    states = np.array([[memory.ctypes.data, capacity, 0, capacity.bit_length() if is_marked else 32]])
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
    """Every text of two tokens, and some longer ones, taken over in two parts: what differs from the reference, if any.

    With several bounds, and marks of as many bits as there are or of none."""
    texts = [text for length in range(1, longest_text + 1) for text in product((0, 1), repeat=length)]
    chance = random.Random(0)
    texts += [tuple(chance.choices((0, 1, 2), weights=(4, 2, 1), k=40)) for _ in range(4)]
    for text, (shortest, longest), match in product(texts, [(1, 1), (1, 3), (2, 3), (3, 3)], ["first", "last"]):
        for is_marked in (True, False):
            cuts = [len(text) // 2, len(text)]
            expected = [reference(list(text[:cut]), shortest, longest, match, 4) for cut in cuts]
            try:
                found = draft(module, text, cuts, shortest, longest, match, 4, is_marked=is_marked)
            except IndexError as error:
                found = error
            if found != expected:
                return text, shortest, longest, match, is_marked, found
    return None


def test_all_small_texts_equal_the_reference():
    assert first_difference(index, longest_text=9) is None


@np.errstate(over="ignore")  # hashes do
def test_all_small_texts_equal_the_reference_with_one_slot_to_spare():
    module = in_python("SLOTS_PER_TOKEN = 2", "SLOTS_PER_TOKEN = 1")
    assert first_difference(module) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("range(max(before, shortest), after)", "range(max(before, shortest) + 1, after)"),  # forgets where steps meet
        ("range(max(before, shortest), after)", "range(max(before, shortest), after + 1)"),  # finds the ending itself
        ("range(max(before, shortest), after)", "range(shortest, after - num + 1)"),  # one step behind
        ("(end > other) == most_recent", "(end > other) != most_recent"),  # the wrong one moves on
        ("(end > start) == most_recent", "(end > start) != most_recent"),
        (" or (num == length and (end > start) == most_recent)", ""),  # the first that is found
        ("num >= shortest and ", ""),  # settles for shorter matches
        ("if length >= item[LENGTH]:", "length = max(length, item[LENGTH])\n        if other > 0:"),  # trusts marks
        ("if length < min(end, longest):", "if length < min(end, longest) - 1:"),  # forgets too soon
        ("end, length + 1", "end, length + 2"),  # moves too far
        ("return other, length", "return 0, 0"),  # forgets what has to move on: the other one
        ("            return end, length", "            return 0, 0"),  # or the one that came
        ("for n in range(item[LENGTH]):", "for n in range(1):"),  # stays at the length it came in at
        ("most = min(end, other, longest)", "most = min(end, other)"),  # prefers matches beyond the longest
        ("if n >= shortest:", "if n > shortest:"),
        ("range(1, min(end, longest) + 1)", "range(1, min(end, longest))"),
        ("while k < len(items) and items[k, ROW] == row:", "if k < len(items) and items[k, ROW] == row:"),
        ("tokens[i], depth - 1", "tokens[i - 1], depth - 1"),
        ("i + 1 if i + 1 < state[NUM_TOKENS] else start", "i + 1"),  # does not go round
    ],
)
@np.errstate(over="ignore")
def test_a_wrong_index_is_caught(old, new):
    assert first_difference(in_python(old, new)) is not None


def test_compiles_where_no_cache_can_be_written():
    names: dict[str, object] = {}
    exec("def double(x):\n    return 2 * x", names)  # numba finds no place for the cache of code that is in no file
    assert compiled("i8(i8)")(names["double"])(21) == 42
