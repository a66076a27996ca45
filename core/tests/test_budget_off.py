"""Requests that the budget turns off: for how long that holds, and what wakes them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

import attrs
import numpy as np
import pytest
import torch
from naive_verifier import draft_of
from simulated_budget import CPU, Simulated, budget_at, request_of

from specdec_core.budget import clock, held, retries
from specdec_core.budget.choice import Expected
from specdec_core.budget.cost_curve import NUM_BETWEEN
from specdec_core.budget.idle import NUM_BESIDE
from specdec_core.budget.retries import Retries
from specdec_core.budget.survival import Past

NOTHING: Mapping[str, int] = MappingProxyType({})


def test_a_retry_that_pays_is_followed_by_others() -> None:
    simulated = Simulated()
    assert not simulated.steps(1000, 0.0)[-50:, 0].all()
    recovering = simulated.steps(200, 1.0)[:, 0]
    first = int(np.flatnonzero(recovering)[0])
    assert np.count_nonzero(recovering[first : first + 20]) == 20
    assert (recovering[first + 10 :] == 6).all()


def test_a_draft_that_is_never_right_ends_and_is_tried_again() -> None:
    simulated = Simulated()
    assert simulated.steps(40, 0.0)[:, 0].sum() > 0
    hopeless = simulated.steps(1000, 0.0)[:, 0]
    assert 0 < np.count_nonzero(hopeless) * (0.1 + 4 * 0.02) <= 0.011 * 1000
    recovering = simulated.steps(200, 1.0)
    assert (recovering[-20:, 0] == 6).all()


def test_a_proposer_that_drafts_again_is_not_idle() -> None:
    budget, requests = budget_at(0.01, "a"), [request_of("a")]
    budget.end_steps([1.0], 1, {})
    budget.retries._debt.add(100.0)
    budget.idle.begin(requests)
    assert budget.stays_idle(requests)
    budget.share(requests, [9], Expected.of_plain(1))  # as when another proposer's retry was due
    assert not budget.stays_idle(requests)


def test_a_retry_is_not_due_where_no_request_may_draft() -> None:
    budget, requests = budget_at(0.01, "a"), [request_of("a")]
    budget.idle._off.add("a")
    budget.share(requests, [0], Expected.of_plain(1))
    budget.idle.begin(requests)
    for _ in range(100):
        budget.end_steps([1.0], 1, {})
        assert budget.retries.is_due
        assert budget.stays_idle(requests)
        budget.pass_step()


@pytest.mark.parametrize("owed_s", [0.0, 0.1, 0.24])
def test_a_rest_lasts_until_the_next_retry_is_due(owed_s: float) -> None:
    budget, requests, number = budget_at(0.01, "a"), [request_of("a")], 0
    budget.retries._debt.add(owed_s)
    expected = budget.most_idle_steps(1)
    budget.idle.begin(requests)
    while not number or budget.stays_idle(requests):
        budget.end_steps([1.0], 1, {})  # as long as the curve has it
        number += 1
    assert expected == number == max(1, round(owed_s / retries.TIME_SHARE + 0.5))


def test_a_rest_does_not_wait_for_retries_where_no_request_may_draft() -> None:
    budget, requests = budget_at(0.01, "a"), [request_of("a")]
    budget.retries._debt.add(1.0)
    budget.share(requests, [0], Expected.of_plain(1))
    assert budget.most_idle_steps(1) == sys.maxsize


def test_only_cheaper_drafts_wake_requests_that_are_off() -> None:
    budget, requests = budget_at(0.01, "a"), [request_of("a")]
    budget.idle._off.add("a")

    def measure(plain_s: float, drafted_s: float) -> None:
        for _ in range(2 * NUM_BETWEEN):
            budget._curve.add(1, 1, plain_s)
            budget._curve.add(1, 5, drafted_s)

    measure(1.0, 2.0)
    budget.share(requests, [0], Expected.of_plain(1))
    budget.idle.begin(requests)
    for plain_s, drafted_s in ((1.0, 2.0), (1.3, 2.6), (1.3, 3.9), (1.0, 2.0)):
        measure(plain_s, drafted_s)
        assert budget.stays_idle(requests), "all steps are slower, or those with drafts"
    measure(1.0, 1.5)
    assert not budget.stays_idle(requests)


def test_while_all_are_off_the_prefill_of_others_wakes_nobody() -> None:
    budget = budget_at(1.0, *"abc", most=2)
    a, b, c = (request_of(name) for name in "abc")
    budget.retries._debt.add(9.0)  # none is due
    assert budget.share([a, b], [2, 2], Expected.of_plain(2)) == [0, 0]
    budget.idle.begin([a, b])
    assert budget.stays_idle([a, b])
    assert budget.stays_idle([a, b, c], is_prefill=True)
    assert not budget.stays_idle([a, b, c]), "a new request may repeat itself"
    assert not budget.stays_idle([b]), "in a smaller batch, drafts may pay"
    budget.finish(a)
    assert budget.stays_idle([b, c], is_prefill=True)
    budget.retries._debt.pay(1e9)
    assert not budget.stays_idle([a, b, c], is_prefill=True)


def test_a_choice_holds_while_only_another_proposer_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, requests, chosen = budget_at(0.01, "a"), [request_of("a")], []
    monkeypatch.setattr(budget, "_choose", lambda rows, limits, so_far: chosen.append(1) or [0])
    monkeypatch.setattr(Retries, "is_due", False)
    for _ in range(2 * held.NUM_HELD):
        assert budget.share(requests, [9], Expected.of_plain(1)) == [0]
        budget.idle.begin(requests)
    assert len(chosen) == 2
    budget.pass_step()
    budget.share(requests, [9], Expected.of_plain(1))
    assert len(chosen) == 3


def test_a_choice_does_not_hold_where_more_may_be_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a step in which a prompt took the room, and a single draft token did not pay."""
    budget, requests = budget_at(0.01, "a"), [request_of("a")]
    monkeypatch.setattr(budget, "_choose", lambda rows, limits, so_far: [limits[0] if limits[0] > 1 else 0])
    monkeypatch.setattr(Retries, "is_due", False)
    found = [budget.share(requests, [limit], Expected.of_plain(1)) for limit in (1, 1, 5, 3, 5, 6)]
    assert found == [[0], [0], [5], [3], [5], [6]]


@pytest.mark.parametrize("is_retry", [False, True])
def test_levels_that_once_were_slow_are_measured_again(is_retry: bool) -> None:
    budget, requests = budget_at(0.01, "a"), [request_of("a")]
    for step in range(20):
        budget._level.add(1, 10.0, step)
    if is_retry:
        budget._choose = lambda rows, limits, so_far: [0]  # type: ignore[method-assign]
    budget._asks_levels = True
    num_forwarded = []
    for _ in range(2 * clock.MOST_AGE):
        (limit,) = budget.share(requests, [6], Expected.of_plain(1))
        if limit:
            levels = budget.levels([limit], CPU)
            assert levels is not None
            one, more = np.array([0]), True
            while more:
                more = bool(levels.goes_on(one, one, np.array([0.9]), np.array([False]), np.array([1])).all())
            budget.keep(attrs.evolve(draft_of([([7], [-1])]), scores=torch.tensor([0.9])))
            budget.end_drafting(0.01, 0.0)
            num_forwarded.append(levels.num_forwarded)
        budget.end_steps([1.0], 1, {})
    assert max(num_forwarded) > 0
    assert budget._level.seconds(1) < 1


def test_a_method_that_mostly_finds_nothing_ends_and_begins_again() -> None:
    """The costs are those of n-grams at temperature 1, where drafting makes no step faster."""
    simulated = Simulated(node=0.153, draft=0.113, most=5)
    simulated.found = 0.14
    simulated.steps(200, 0.5)
    assert np.count_nonzero(simulated.steps(200, 0.5)[:, 0]) < 10
    simulated.found = 1.0
    assert simulated.steps(600, 0.9)[-20:, 0].all()


def test_a_new_request_like_those_that_are_off_is_not_asked_about() -> None:
    budget, (a, b, c) = budget_at(1.0, *"abc", most=2), [request_of(name) for name in "abc"]
    budget.retries._debt.add(9.0)  # none is due
    budget.idle._judged.clear()
    assert budget.share([a, b], [2, 2], Expected.of_plain(2)) == [0, 0]
    budget.idle.begin([a, b])
    budget.finish(b)
    assert budget.stays_idle([a, c])
    assert budget.is_off(c)
    assert not budget.stays_idle([a, b, c]), "a larger batch"
    assert budget.share([a, c], [2, 2], Expected.of_plain(2)) == [0, 0]
    budget._unlearned.past.append(Past([a], budget.survival.rows([a]), [9], [9], draft_of([([7], [-1])])))
    budget._learn()
    budget.idle.begin([a, c])
    budget.start(b, is_sampled=False)
    assert not budget.stays_idle([a, b]), "something was learned"


def test_a_method_that_is_off_beside_another_one_does_not_choose_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, requests, chosen = budget_at(0.01, "a"), [request_of("a")], []
    monkeypatch.setattr(budget, "_choose", lambda rows, limits, so_far: chosen.append(1) or [0])
    monkeypatch.setattr(Retries, "is_due", False)
    for _ in range(2 * held.NUM_HELD):
        assert budget.share(requests, [9], Expected(np.ones(1), 1, covered=np.full((1, 2), 0.5))) == [0]
    assert len(chosen) == 2


def test_how_long_a_method_is_not_asked_beside_another_one() -> None:
    budget, requests = budget_at(0.01, "a"), [request_of("a")]
    budget.retries._debt.add(9.0)  # none is due
    budget.idle.begin(requests, is_beside=True)
    assert [budget.stays_idle(requests, is_beside=True) for _ in range(NUM_BESIDE + 2)] == [True] * NUM_BESIDE + [
        False
    ] * 2
    budget.idle.begin(requests, is_beside=True)
    assert not budget.stays_idle(requests), "what does not pay beside others may pay alone"
    budget.idle.begin(requests)
    assert all(budget.stays_idle(requests, is_beside=True) for _ in range(2 * NUM_BESIDE))


def test_a_method_is_not_asked_beside_another_one_because_some_requests_end() -> None:
    budget, requests = budget_at(0.01, *"abcd"), [request_of(name) for name in "abcd"]
    budget.retries._debt.add(9.0)  # none is due
    budget.idle.decide(requests, [0] * 4)
    budget.idle.begin(requests, is_beside=True)
    found = []
    for number in (4, 3, 3, 1):
        for request in requests[number:]:
            budget.idle.forget(request)
        found.append(budget.stays_idle(requests[:number], is_beside=True))
    assert found == [True] * 4
    assert not budget.stays_idle([*requests[:1], request_of("new")], is_beside=True)
    assert not all(budget.stays_idle(requests[:1], is_beside=True) for _ in range(NUM_BESIDE))


def test_it_holds_for_most_requests_when_a_few_end() -> None:
    budget, requests = budget_at(0.01, *"abcdefgh"), [request_of(name) for name in "abcdefgh"]
    budget.retries._debt.add(9.0)  # none is due
    budget.idle.decide(requests, [0] * 8)
    budget.idle.begin(requests)
    found = []
    for number in (8, 7, 6, 5):
        for request in requests[number:]:
            budget.idle.forget(request)
        found.append(budget.stays_idle(requests[:number]))
    assert found == [True, True, True, False], "in a much smaller batch, drafts may pay"


def test_what_did_not_pay_beside_others_may_pay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, requests, chosen = budget_at(0.01, "a"), [request_of("a")], []
    numbers = iter([0, 5, 0])
    monkeypatch.setattr(budget, "_choose", lambda rows, limits, so_far: chosen.append(1) or [next(numbers)])
    monkeypatch.setattr(Retries, "is_due", False)
    beside, alone = Expected(np.ones(1), 1, covered=np.full((1, 2), 0.5)), Expected.of_plain(1)
    found = [budget.share(requests, [9], so_far) for so_far in (beside, beside, alone, alone, beside)]
    assert found == [[0], [0], [5], [5], [0]], "what pays alone may not pay beside others"
    assert len(chosen) == 3
