"""Histories for logits processors: each row's own, read-only, without a copy of the context for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specdec_core.sampling.history import History

KEPT: dict[str, Callable[[np.ndarray], Any]] = {
    "nothing": lambda history: None,
    "a copy": lambda history: history.copy(),
    "itself": lambda history: history,
    "a view": lambda history: history[len(history) // 2 :],
    "a view of a view": lambda history: history[1:][::-1],
    "a tensor": lambda history: torch.from_dlpack(history.astype(np.int32)),
    "a buffer": memoryview,
}
TOKENS = st.lists(st.integers(0, 9), max_size=4)
ROWS = st.lists(st.tuples(TOKENS, st.sampled_from(sorted(KEPT))), max_size=5)


def check(steps: list[tuple[list[int], list[tuple[list[int], str]]]]) -> None:
    """Ask for the histories of several rows in several steps. What a processor keeps of one must not change.

    steps: in each, the tokens that are new, and for each row its path and what is kept of its history.
    """
    history, tokens, kept = History(), [7], []
    for appended, rows in steps:
        tokens += appended
        for path, name in rows:
            expected = np.array([*tokens, *path])
            found = history.of(np.array(tokens), np.array(path, dtype=np.int64))
            assert found.dtype == np.int64
            assert np.array_equal(found, expected)
            kept.append((KEPT[name](found), KEPT[name](expected)))
            del found
    for found, expected in kept:
        assert np.array_equal(np.asarray(found), np.asarray(expected))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TOKENS, ROWS), max_size=5))
def test_histories_are_right_and_stay_so(steps: list[Any]) -> None:
    check(steps)


@pytest.mark.parametrize("name", ["itself", "a view", "a view of a view", "a buffer"])
def test_the_check_notices_a_history_that_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [([1, 2], [([3, 4], name), ([5], name)]), ([6], [([8], name)])]
    check(steps)
    monkeypatch.setattr("specdec_core.sampling.history.weakref.ref", lambda history: lambda: None)
    with pytest.raises(AssertionError):
        check(steps)


def test_rows_and_steps_share_a_buffer() -> None:
    history, tokens = History(), np.arange(1000)
    history.of(tokens[:900], np.array([5]))
    first = history._buffer
    for length in range(900, 1000):
        for path in ([], [1, 2], [3]):
            assert np.shares_memory(history.of(tokens[:length], np.array(path, dtype=np.int64)), first)


def test_a_history_cannot_be_written_to() -> None:
    found = History().of(np.arange(3), np.arange(2))
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        found.flags.writeable = True
