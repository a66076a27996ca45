"""Where an output is in its prediction."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, strategies as st

from specdec_proposer_prediction.alignment import IN_STEP, Alignment

PREDICTION = np.arange(100, 140)


def after(*output: int) -> list[tuple[int, int]]:
    alignment = Alignment(PREDICTION)
    alignment.follow(output)
    return alignment.places()


def test_it_begins_at_the_beginning() -> None:
    assert after() == [(0, IN_STEP)]


def test_an_output_that_agrees_has_one_place() -> None:
    assert after(100, 101, 102, 103) == [(4, IN_STEP + 4)]


def test_a_replaced_token() -> None:
    """7 stands for 102, or was inserted before it."""
    assert after(100, 101, 7) == [(3, 0), (2, 0)]
    assert after(100, 101, 7, 103) == [(4, 1), (2, 0)], "the next token says that it was replaced"
    assert after(100, 101, 7, 103, 104, 105) == [(6, 3)]


def test_inserted_tokens() -> None:
    assert after(100, 101, 7, 8, 9)[-1] == (2, 0)
    places = after(100, 101, 7, 8, 9, 102, 103)
    assert places[0] == (4, 2)
    assert after(100, 101, 7, 8, 9, 102, 103, 104) == [(5, 3)]


def test_deleted_tokens() -> None:
    assert after(100, 101, 120)[:2] == [(3, 0), (21, 1)]
    assert after(100, 101, 120, 121)[0] == (22, 2)
    assert after(100, 101, 120, 121, 122) == [(23, 3)]


def test_it_goes_back_where_text_is_moved() -> None:
    assert after(*range(120, 130), *range(100, 105)) == [(5, 5)]


def test_the_end() -> None:
    assert after(*PREDICTION.tolist()) == [(40, IN_STEP + 40)]
    assert all(place < 40 for place, _ in after(*PREDICTION.tolist(), 7))


def following(prediction: list[int], output: list[int]) -> Alignment:
    alignment = Alignment(np.array(prediction))
    alignment.follow(output)
    return alignment


def test_a_change_is_expected_again() -> None:
    prediction = [1, 2, 3, 50, 4, 5, 6, 50, 7, 8, 50]
    alignment = following(prediction, [1, 2, 3, 60, 61, 4, 5, 6])
    ((place, _),) = alignment.places()
    assert alignment.expected(place, 9) == [60, 61, 7, 8, 60, 61]
    assert alignment.expected(place, 4) == [60, 61, 7, 8]
    alignment.follow([60, 61])
    assert alignment.places() == [(8, IN_STEP)], "the change itself keeps the output in step"
    alignment.follow([7, 8, 50])
    assert alignment.places()[0][0] == len(prediction)


def test_a_change_is_forgotten_where_it_was_not_made() -> None:
    prediction = [1, 2, 3, 50, 4, 5, 6, 50, 7, 8, 9, 50, 10]
    alignment = following(prediction, [1, 2, 3, 60, 4, 5, 6, 50, 7, 8, 9])
    ((place, _),) = alignment.places()
    assert alignment.expected(place, 9) == [50, 10]


def test_an_empty_prediction_has_no_guesses() -> None:
    alignment = Alignment(np.empty(0, dtype=np.int64))
    alignment.follow([1, 2])
    assert alignment.places() == []


TOKENS = st.lists(st.integers(0, 5), max_size=30)


@given(TOKENS, TOKENS)
@example([1, 1, 0, 0, 1, 1], [0, 1, 0, 0, 0, 1])  # a change that is made again, and then forgotten
def test_runs_are_true(prediction: list[int], output: list[int]) -> None:
    """Where a place has a run, so many of the newest output tokens are what the prediction has before the place. The
    beginning counts as a run of IN_STEP, and so does a change that is made again."""
    alignment, has_changed = Alignment(np.array(prediction, dtype=np.int64)), False
    for token in output:
        alignment.follow([token])
        has_changed |= bool(alignment._changes)
    places = alignment.places()
    assert len({place for place, _ in places}) == len(places)
    for place, run in places:
        number = 0 if has_changed else min(run, place)
        assert 0 <= place <= len(prediction)
        assert prediction[place - number : place] == output[len(output) - number :]
        assert run <= place + IN_STEP


@given(TOKENS, st.integers(0, 2**31))
def test_following_at_once_or_token_by_token_is_the_same(output: list[int], seed: int) -> None:
    prediction = np.random.default_rng(seed).integers(0, 6, 25)
    at_once, one_by_one = Alignment(prediction), Alignment(prediction)
    at_once.follow(output)
    for token in output:
        one_by_one.follow([token])
        one_by_one.places()
    assert at_once.places() == one_by_one.places()
