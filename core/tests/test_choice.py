"""The rule of the budget: draft tokens are taken as long as that lowers the expected time per output token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from specdec_core.budget.choice import Expected, best_levels, best_nodes


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_other_number_of_levels_is_expected_to_take_less_time_per_token(data: st.DataObject) -> None:
    num_requests, num_levels = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    rates = np.array(data.draw(st.lists(st.floats(0.01, 1), min_size=9, max_size=9))).reshape(3, 3)
    gains = rates[:num_requests, :num_levels].cumprod(axis=1)
    steps = data.draw(st.lists(st.sampled_from([0.0, 0.01, 0.2, 1.0]), min_size=14, max_size=14))
    seconds = 1 + np.cumsum(steps)
    first_s, level_s = data.draw(st.sampled_from([0, 0.3, 2])), data.draw(st.sampled_from([0, 0.1, 0.5]))
    before = np.array(data.draw(st.lists(st.sampled_from([1.0, 1.7]), min_size=3, max_size=3)))[:num_requests]
    others = data.draw(st.sampled_from([0.0, 1.0]))  # a request that gets no drafts
    num_rows = num_requests + round(others)

    def time(numbers: np.ndarray) -> float:
        tokens = before + [row[:number].sum() for row, number in zip(gains, numbers, strict=True)]
        drafted_s = first_s + level_s * numbers.max() if numbers.any() else 0
        return float((others + (1 / tokens).sum()) * (seconds[num_rows + numbers.sum()] + drafted_s))

    so_far = Expected(before, num_rows, others=others)
    found, share = best_levels(gains, np.ones(num_requests, dtype=np.int64), so_far, seconds, first_s, level_s)
    everything = np.array(np.meshgrid(*[range(num_levels + 1)] * num_requests)).reshape(num_requests, -1).T
    # Levels are taken by falling gain. With a cost per level, shallower ones of other requests might do better.
    tokens = before[:, None] + gains.cumsum(axis=1)
    saved = -np.diff(1 / tokens, axis=1, prepend=1 / before[:, None])
    by_gain = [n for n in everything if _is_by_gain(saved, n)]
    assert time(found) == pytest.approx(min(time(numbers) for numbers in by_gain))
    assert time(found) == pytest.approx((1 - share) * time(np.zeros_like(found)))


@pytest.mark.parametrize("found", [0.1, 0.4, 0.9])
def test_a_step_in_which_nothing_is_found_takes_as_long_as_a_plain_one(found: float) -> None:
    """Only the first draft token takes time. So nothing may be taken from a step of the expected number of tokens."""
    seconds, gains = np.array([1.0, 1.0, *[1.5] * 9]), found * np.array([[0.9, 0.8, 0.6]])
    chosen, share = best_levels(gains, np.array([found]), Expected.of_plain(1), seconds, 0.01, 0.0, 1 - found)
    expected = ((1 - found) * 1.0 + found * 1.5 + 0.01) / (1 + gains.sum())
    assert chosen.tolist() == [3]
    assert share == pytest.approx(1 - expected)
    _, of_mean = best_levels(gains, np.array([found]), Expected.of_plain(1), seconds, 0.01, 0.0)
    assert of_mean < share - 0.01


def _is_by_gain(gains: np.ndarray, numbers: np.ndarray) -> bool:
    levels = np.arange(gains.shape[1])
    is_taken = levels < numbers[:, None]
    return not is_taken.any() or is_taken.all() or gains[is_taken].min() >= gains[~is_taken].max()


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_other_draft_tokens_are_expected_to_take_less_time_per_token(data: st.DataObject) -> None:
    requests = np.array(sorted(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))))
    gains = np.array(data.draw(st.lists(st.floats(0, 1), min_size=len(requests), max_size=len(requests))))
    for request in range(3):  # a chain each, so that gains fall
        gains[requests == request] = gains[requests == request].cumprod()
    steps = data.draw(st.lists(st.sampled_from([0.0, 0.05, 0.2]), min_size=10, max_size=10))
    seconds, so_far = 1 + np.cumsum(steps), Expected(np.array([1.0, 1.5, 2.0]), 3, 0.1)

    def time(kept: np.ndarray) -> float:
        tokens = so_far.tokens + np.bincount(requests[kept], gains[kept], 3)
        return float((1 / tokens).sum() * (seconds[3 + kept.sum()] + 0.1))

    def is_tree(kept: np.ndarray) -> bool:
        return all((np.diff(kept[requests == request].astype(int)) <= 0).all() for request in range(3))

    found = best_nodes(gains, requests, so_far, seconds)
    assert is_tree(found)
    subsets = (np.array([bits >> i & 1 for i in range(len(gains))], dtype=bool) for bits in range(2 ** len(gains)))
    assert time(found) == pytest.approx(min(time(kept) for kept in subsets if is_tree(kept)))


def test_a_few_requests_do_not_slow_down_all_others() -> None:
    """One of eight requests gets four tokens more. All output tokens per second rise by 15 %, while the time per token
    of most requests does, too."""
    gains, sizes = np.zeros((8, 4)), np.ones(8)
    gains[0] = 1
    seconds = np.interp(np.arange(13), [0, 8, 12], [1, 1, 1.3])
    so_far = Expected.of_plain(8)
    assert 12 / seconds[12] > 1.15 * 8 / seconds[8]
    assert not best_levels(gains, sizes, so_far, seconds, 0.0, 0.0)[0].any()
    gains[:, :2] = 0.9  # all of them gain
    assert best_levels(gains, sizes, so_far, np.interp(np.arange(33), [0, 8, 32], [1, 1, 1.6]), 0.0, 0.0)[0].all()


def test_draft_tokens_that_cost_nothing_are_all_taken() -> None:
    flat = np.ones(30)
    gains = np.array([[0.5, 0.25], [0.1, 0.01]])
    assert best_levels(gains, np.array([1, 1]), Expected.of_plain(2), flat, 0.0, 0.0)[0].tolist() == [2, 2]
    assert best_nodes(np.array([0.9, 0.01, 0.3]), np.zeros(3, dtype=int), Expected.of_plain(1), flat).all()


def test_nothing_is_drafted_where_plain_decoding_is_faster() -> None:
    gains = np.array([[0.5, 0.25], [0.1, 0.01]])
    steep = np.arange(30.0)
    assert not best_levels(gains, np.array([1, 1]), Expected.of_plain(2), steep, 0.0, 0.0)[0].any()
    assert not best_levels(gains, np.array([1, 1]), Expected.of_plain(2), np.ones(30), 9.0, 0.0)[0].any()
    assert not best_nodes(np.array([0.4, 0.2]), np.zeros(2, dtype=int), Expected.of_plain(1), steep).any()
