"""Tests of `loop_start` and `ngram_counts`, which find repetition in token sequences."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from specdec_tools.repetition import MAX_PERIOD, MIN_COPIED, loop_start, ngram_counts


def naive_loop_start(tokens: list[int]) -> int:
    """Compute `loop_start` by brute force over all positions and periods."""
    for start in range(len(tokens)):
        for period in range(1, min(MAX_PERIOD, start) + 1):
            end = start + max(period, MIN_COPIED)
            if end <= len(tokens) and all(tokens[i] == tokens[i - period] for i in range(start, end)):
                return start
    return len(tokens)


SOME = st.lists(st.integers(0, 2), max_size=50)


@st.composite
def looping(draw: st.DrawFn) -> list[int]:
    """Draw token ids: random ones, then up to 20 copies of a segment, the last one perhaps cut, then random ones."""
    segment = draw(st.lists(st.integers(0, 40), min_size=1, max_size=MAX_PERIOD + 3))
    repeated = segment * draw(st.integers(1, 20))
    return draw(SOME) + repeated[: len(repeated) - draw(st.integers(0, len(segment)))] + draw(SOME)


@given(st.one_of(SOME, looping()))
def test_it_is_the_first_place_of_the_definition(tokens: list[int]) -> None:
    assert loop_start(tokens) == naive_loop_start(tokens)


@given(looping(), SOME)
def test_more_text_does_not_undo_a_loop(tokens: list[int], more: list[int]) -> None:
    start = loop_start(tokens)
    if start < len(tokens):
        assert loop_start(tokens + more) <= start


@given(SOME, st.integers(1, MAX_PERIOD))
def test_the_first_occurrence_counts_as_text(before: list[int], period: int) -> None:
    before = [token + 1000 for token in before[:10]]  # too few for a loop of their own
    segment = list(range(period))
    assert loop_start(before + segment * (2 + MIN_COPIED // period)) == len(before) + period


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        ([], 0),
        ([7] * MIN_COPIED, MIN_COPIED),
        ([7] * (MIN_COPIED + 1), 1),
        ([*range(30), *range(29)], 59),
        ([*range(30), *range(29), *range(100, 120)], 79),
        ([*range(30), *range(30)], 30),
        ([*range(MAX_PERIOD + 1)] * 3, 3 * (MAX_PERIOD + 1)),
    ],
)
def test_what_is_a_loop(tokens: list[int], start: int) -> None:
    assert loop_start(tokens) == start


def test_ngrams() -> None:
    assert ngram_counts([1, 2, 3, 4, 5]) == (2, 2)
    assert ngram_counts([1] * 10) == (1, 7)
    assert ngram_counts([1, 2, 3]) == (0, 0)
