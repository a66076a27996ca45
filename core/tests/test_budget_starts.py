"""What the start of a run of drafts costs, and that a run has to pay for it."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_budget import budget_at, request_of

from specdec_core.budget.budget import Budget
from specdec_core.budget.choice import Expected
from specdec_core.budget.starts import FIRST_LENGTH, Starts
from specdec_core.budget.survival import ANY
from specdec_core.contracts.draft import Draft


def test_the_cost_of_a_start_is_shared_by_the_steps_of_a_run() -> None:
    starts = Starts()
    assert starts.seconds(2, 0) == 0
    starts.add(4, 8.0, step=1)
    assert starts.seconds(2, 1) == pytest.approx(2 * 2.0 / FIRST_LENGTH)
    for _ in range(40):
        for _ in range(3):
            starts.go_on()
            assert starts.seconds(2, 1) == 0
        starts.end()
        starts.end()
    assert starts.seconds(2, 1) == pytest.approx(2 * 2.0 / 3, rel=0.01)


REQUESTS = [request_of("a")]


def run(budget: Budget, seconds: float, late_s: float, *, others: int = 0) -> bool:
    """A step, and perhaps some without drafts after it. Returns whether something was drafted."""
    drafts = any(budget.share(REQUESTS, [9], Expected.of_plain(1)))
    if drafts:
        budget.levels([9], Draft.from_chains([[]]).token_ids.device)
        budget.keep(Draft.from_chains([[7] * 3]))
        budget.end_drafting(seconds, late_s)
    budget.end_steps([1.0], 1, {})
    for _ in range(others):
        budget.pass_step()
        budget.end_steps([1.0], 1, {})
    return drafts


@pytest.mark.parametrize("late_s", [0.0, 4.0])
def test_single_drafts_must_pay_for_their_starts(late_s: float) -> None:
    """Each draft is followed by steps without. It saves about as much as a plain step takes."""
    budget = budget_at(0.01, "a")
    budget.survival._rates.estimates[:] = 0.7
    budget.survival._rates.estimates[:, ANY] = 1.0
    budget.survival.learn = lambda past, **_: None  # type: ignore[method-assign]
    budget.survival.update = lambda rows: None  # type: ignore[method-assign]
    budget.retries._debt.add(1e9)
    for step in range(9):
        budget._first.add(1, 0.2, step)
    drafted = [run(budget, 0.2, late_s, others=3) for _ in range(40)]
    assert all(drafted) == (late_s == 0)
    assert 1 <= np.count_nonzero(drafted) <= 20 or late_s == 0


def test_first_drafts_do_not_make_others_seem_dear() -> None:
    budget = budget_at(0.01, "a")
    budget.retries._debt.add(1e9)
    for step in range(9):
        budget._first.add(1, 0.2, step)
    assert run(budget, 5.0, 0.0)
    assert budget._first.seconds(1) == pytest.approx(0.2)
    assert run(budget, 0.4, 0.0)
    assert budget._first.seconds(1) > 0.21
