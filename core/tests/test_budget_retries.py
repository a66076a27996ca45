"""When requests that are off are tried again, and what a retry costs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from simulated_budget import CPU, Simulated, budget_at, request_of

from specdec_core.budget import clock, retries
from specdec_core.budget.budget import Budget
from specdec_core.budget.choice import Expected
from specdec_core.budget.cost_curve import CostCurve
from specdec_core.budget.plain_steps import PlainSteps
from specdec_core.budget.recent import NUM_NEEDED
from specdec_core.budget.retries import Retries
from specdec_core.contracts.draft import Draft

NOTHING: Mapping[str, int] = MappingProxyType({})


def test_a_retry_pays_for_being_observed() -> None:
    costs = []
    for observed_s in (0.0, 5.0):
        budget, requests = budget_at(0.01, "a"), [request_of("a")]
        for _ in range(9):
            budget.observed(1, observed_s)
        costs.append(cost_of_retry(budget, requests, [0], 0.0, 0.0))
    assert costs[1] - costs[0] == pytest.approx(5.0)


def cost_of_retry(
    budget: Budget,
    requests: list[Any],
    numbers: list[int],
    drafted_s: float,
    late_s: float,
    step_s: float = 0.0,
    accepted: Mapping[str, int] = NOTHING,
) -> float:
    """Let the requests with number 0 be tried again. Returns what they are charged."""
    budget._choose = lambda rows, limits, so_far: numbers  # type: ignore[method-assign]
    expected = [number or retries.NUM_TOKENS for number in numbers]
    budget._asks_levels = False
    assert budget.share(requests, [9] * len(requests), Expected.of_plain(len(requests))) == expected
    budget.levels(expected, CPU)
    budget.keep(Draft.from_chains([[5]] * len(requests)))
    budget.end_drafting(drafted_s, late_s)
    budget.end_steps([step_s], len(requests), accepted)
    return budget.retries._debt._owed_s / retries.LEAST_RARE


def test_a_retry_pays_what_it_took_less_what_it_gained() -> None:
    def cost(step_s: float, num_accepted: int) -> float:
        accepted = {"a": num_accepted}
        return cost_of_retry(budget_at(0.01, "a"), [request_of("a")], [0], 0.5, 0.0, step_s, accepted)

    estimated = 0.01 + 0.5  # a draft token was found
    assert cost(1.2, 0) == pytest.approx(0.5), "drafting took longer than the step took more than a plain one, of 1"
    assert cost(1.9, 0) == pytest.approx(0.9)
    assert cost(99.0, 0) == pytest.approx(retries.OUTLIER * estimated)
    assert cost(3.0, 1) == pytest.approx(1.0)
    assert cost(1.9, 1) == pytest.approx(-retries.GAIN_SHARE * (1.0 - 0.9) / retries.LEAST_RARE)


@pytest.mark.parametrize("measured", [3.0, 30.0])
def test_a_curve_that_was_measured_on_a_busy_machine_is_corrected(measured: float) -> None:
    """By it, draft tokens never pay. Retries show that they do, and measure what they cost."""
    simulated = Simulated(is_measured=True)
    simulated.budget = budget_at(measured, "any", most=6)  # a draft token takes so many times as long as a plain step
    simulated.plain = PlainSteps(simulated.budget._curve)
    assert simulated.budget._curve.at(1, 5) > 4 * simulated.budget._curve.at(1)
    drafted = simulated.steps(500, 1.0)[:, 0]
    assert np.count_nonzero(drafted[-200:]) > 180


def test_a_retry_beside_a_prompt_does_not_pay_for_reading_it() -> None:
    tried = Retries()
    tried.choose(["a"], [9], [0])
    tried.expect(0.5, 0.0)
    tried.end_steps([100.0], 1.0, {}, 1, is_prefill=True)
    assert tried._debt._owed_s == 0.5 * retries.LEAST_RARE


def test_the_first_retries_of_a_proposer_that_observes_nothing_are_free() -> None:
    """They may be slow, and one alone would keep it off for hundreds of steps."""
    owed = []
    for observes in (True, False):
        budget = Budget(CostCurve({1: 1.0, 2: 1.01}, 64), 1, 9, in_place=False, observes=observes)
        budget.start(request_of("a"), is_sampled=False)
        owed.append(cost_of_retry(budget, [request_of("a")], [0], 5.0, 0.0))
    assert owed == pytest.approx([5.0, 0.0])


def test_a_retry_beside_other_requests_pays_for_its_part() -> None:
    budget, requests = budget_at(0.01, "a", "b"), [request_of("a"), request_of("b")]
    tokens_s = budget._curve.more_s(2, 2, 1)
    assert cost_of_retry(budget, requests, [9, 0], 2.0, 0.5) == pytest.approx(tokens_s + 2.0 / 2 + 0.5)


def test_a_retry_is_not_free_because_others_gain() -> None:
    budget, requests = budget_at(0.01, "a", "b"), [request_of("a"), request_of("b")]
    alone = cost_of_retry(budget, requests, [9, 0], 2.0, 0.0)
    for accepted, is_paid in (({"a": 9}, False), ({"b": 9}, True)):
        budget = budget_at(0.01, "a", "b")
        cost = cost_of_retry(budget, requests, [9, 0], 2.0, 0.0, accepted=accepted)
        assert cost < 0 if is_paid else cost == pytest.approx(alone)


def test_a_few_requests_are_tried_again_in_turn() -> None:
    budget, tried = budget_at(1.0, *"abcdef"), []
    requests = [request_of(name) for name in "abcdef"]
    budget._choose = lambda rows, limits, so_far: [0] * 6  # type: ignore[method-assign]
    for _ in range(3):
        tried.append(budget.share(requests, [9, 9, 2, 9, 9, 9], Expected.of_plain(6)))
        assert budget.retries.number == retries.MOST_TOGETHER
    assert tried == [[4, 4, 2, 4, 0, 0], [4, 4, 0, 0, 4, 4], [0, 0, 2, 4, 4, 4]]


def test_retries_become_rarer_where_none_gains() -> None:
    tried, owed = Retries(), []
    for gains in [0] * 40 + [9] + [0]:
        tried._debt.pay(1e9)
        tried.choose(["a"], [4], [0])
        tried.expect(1.0, 0.0)
        tried.end_steps([1.0], 0.5, {"a": gains}, 1)
        owed.append(tried._debt._owed_s)
    assert owed[0] == retries.LEAST_RARE
    assert owed[retries.NUM_PATIENT // 2] == retries.LEAST_RARE + 0.5
    assert owed[39] == retries.MOST_RARE
    gained = retries.GAIN_SHARE * (9 * 0.5 - 1.0)
    assert owed[40:] == [-gained, -gained + 1.0], "one that gains is followed by others"


def test_retries_that_could_not_gain_become_rarer_still() -> None:
    tried, owed = Retries(), []
    for step in range(40):
        tried._debt.pay(1e9)
        tried.choose(["a"], [4], [0])
        tried.judge(may_gain=step == 39)
        tried.expect(1.0, 0.0)
        tried.end_steps([1.0], 0.5, {}, 1)
        owed.append(tried._debt._owed_s)
    assert owed[:2] == [retries.LEAST_RARE + 1, retries.LEAST_RARE + 1 / retries.NUM_PATIENT + 2]
    assert owed[38:] == [retries.MOST_RARE + retries.MOST_HOPELESS, retries.MOST_RARE]


def test_retries_may_cost_a_share_of_what_drafting_saves() -> None:
    tried = Retries()
    assert tried._debt.share == retries.TIME_SHARE
    for _ in range(99):
        tried.end_steps([2.0], 1.0, {"a": 3, "b": 5}, 2)  # 4 plain steps' tokens more, for another plain step's time
    assert tried._debt.share == pytest.approx(retries.TIME_SHARE + retries.SAVED_SHARE * 3 / 2)
    for _ in range(99):
        tried.end_steps([1.0] * 96, 1.0, {}, 2)
    assert tried._debt.share == pytest.approx(retries.TIME_SHARE, rel=1e-3)
    for _ in range(99):
        tried.end_steps([9.0], 1.0, {"a": 1}, 2)
    assert tried._debt.share == retries.TIME_SHARE, "it loses"


def test_a_request_that_starts_may_be_tried_again() -> None:
    budget = budget_at(0.01, "a", "b")
    budget.share([request_of("a")], [0], Expected.of_plain(1))
    budget.start(request_of("b"), is_sampled=False)
    budget.idle._off.add("b")
    budget.idle.begin([request_of("b")])
    assert not budget.stays_idle([request_of("b")])


def test_the_next_retry_comes_sooner_once_drafts_may_gain() -> None:
    tried = Retries()
    for may_gain in (False, False, True):
        tried.judge(may_gain=may_gain)
        before = tried._debt._owed_s
        if not may_gain:
            tried._debt.pay(1e9)
            tried.choose(["a"], [4], [0])
            tried.expect(1.0, 0.0)
            tried.end_steps([1.0], 0.5, {}, 1)
    assert before == pytest.approx((retries.LEAST_RARE + 1 / retries.NUM_PATIENT + 2) / 3)


@pytest.mark.parametrize(("draft", "may_gain"), [(0.1, True), (2.0, True), (9.0, False)])
def test_whether_drafts_may_gain_goes_by_costs_alone(draft: float, may_gain: bool) -> None:
    """Steps with up to 6 draft tokens, of which none is ever right."""
    simulated = Simulated(draft=draft)
    drafted = simulated.steps(9000, 0.0)[:, 0]
    assert not simulated.budget.saved_share
    assert simulated.budget.retries.may_gain == may_gain
    if not may_gain:
        assert np.count_nonzero(drafted[1000:]) * draft <= 0.005 * 8000, "else it is 0.01"


def test_gains_of_retries_pay_for_a_few_that_gain_nothing() -> None:
    tried, num_vain = Retries(), 0

    def try_again(gains: int) -> None:
        tried.begin()
        tried.choose(["a"], [4], [0])
        tried.expect(1.0, 0.0)
        tried.end_steps([1.0], 0.5, {"a": gains}, 1)

    for _ in range(100):
        try_again(9)
    assert tried._debt._owed_s == -retries.MOST_SAVED
    while tried.is_due and num_vain < 100:
        try_again(0)
        num_vain += 1
    assert num_vain == retries.MOST_SAVED + 1


def test_one_slow_retry_does_not_stop_the_next_ones() -> None:
    budget, requests = budget_at(0.01, "a"), [request_of("a")]
    for step in range(clock.NUM_SKIPPED + NUM_NEEDED):
        budget._first.add(1, 0.1, step)
    assert cost_of_retry(budget, requests, [0], 100.0, 0.0) == pytest.approx(retries.OUTLIER * 0.1)
