"""How much the estimates follow the recent draft tokens of a request and of all requests."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_core.budget.rates import Rates

ROWS = np.arange(16)
BINS = np.zeros(len(ROWS), dtype=np.int64)


def errors(spread: float, common: float = 0.0, num_requests: int = 20, length: int = 60) -> tuple[float, float]:
    """The mean squared error of the estimates, and that of the mean of all, in the second half of the requests.

    The probability of acceptance of a request's draft tokens is drawn from 0.5 +- spread, and half of the time all are
    higher by `common`, else lower.
    """
    random, found = np.random.default_rng(0), Rates(len(ROWS), np.array([0.5]))
    squares = []
    for number in range(num_requests):
        right = 0.5 + spread * random.choice([-1, 1], len(ROWS)) + common * (-1) ** (number // 2)
        for row in ROWS:
            found.start(row, 0)
        for _ in range(length):
            found.update(ROWS)
            if number >= num_requests / 2:
                squares.append((found.estimates[ROWS, 0] - right) ** 2)
            found.add(ROWS, BINS, random.random(len(ROWS)) < right)
    return float(np.mean(squares)), spread**2 + common**2


def test_chance_is_not_taken_for_a_difference_between_requests() -> None:
    """All draft tokens are alike. Estimates that count on all of a shift err by 0.085 (the root of 0.0072)."""
    error, _ = errors(spread=0.0)
    assert error < 0.025**2


@pytest.mark.parametrize(("spread", "common"), [(0.3, 0.0), (0.0, 0.3), (0.3, 0.15)])
def test_differences_that_last_are_followed(spread: float, common: float) -> None:
    error, of_mean = errors(spread, common)
    assert error < 0.35 * of_mean


def test_differences_are_followed_again_after_long_chance() -> None:
    random, found = np.random.default_rng(0), Rates(len(ROWS), np.array([0.5]))
    for _ in range(10_000):
        found.add(ROWS, BINS, random.random(len(ROWS)) < 0.5)
    right = np.where(ROWS % 2, 0.9, 0.1)
    for _ in range(30):
        found.add(ROWS, BINS, random.random(len(ROWS)) < right)
    found.update(ROWS)
    assert (abs(found.estimates[ROWS, 0] - right) < 0.2).all()


def test_each_group_has_shares_of_its_own() -> None:
    random, found = np.random.default_rng(0), Rates(len(ROWS), np.array([0.5]))
    groups = ROWS // 8  # all alike in group 1
    for number in range(100):
        right = np.where(groups == 0, 0.5 + 0.4 * (-1) ** ROWS, 0.5)
        for row in ROWS if number % 4 == 0 else ():
            found.start(row, groups[row])
        for _ in range(20):
            found.add(ROWS, BINS, random.random(len(ROWS)) < right)
    found.update(ROWS)
    distance = abs(found.estimates[ROWS, 0] - 0.5)
    assert distance[groups == 0].min() > 0.2
    assert distance[groups == 1].max() < 0.1


@pytest.mark.parametrize("is_mixed", [False, True])
def test_tables_share_nothing(is_mixed: bool) -> None:
    """Two tables in one count as two. With the bins of one table for those of the other, they do not."""
    random, guesses = np.random.default_rng(0), (np.array([0.5, 0.7]), np.array([0.9]))
    together, alone = Rates(len(ROWS), *guesses), [Rates(len(ROWS), each) for each in guesses]
    for row in ROWS:
        for each in (together, *alone):
            each.start(row, row % 3)
    for _ in range(50):
        rows, bins = random.integers(0, len(ROWS), 40), random.integers(0, 3, 40)
        accepted = random.random(40) < np.array([0.2, 0.9, 0.6])[bins]
        together.add(rows, (bins + is_mixed) % 3, accepted)
        for table, each in enumerate(alone):
            is_own = (bins == 2) == bool(table)
            each.add(rows[is_own], bins[is_own] - 2 * table, accepted[is_own])
    for each in (together, *alone):
        each.update(ROWS)
    expected = np.concatenate([each.estimates for each in alone], axis=1)
    assert np.allclose(together.estimates, expected, rtol=1e-12) != is_mixed
