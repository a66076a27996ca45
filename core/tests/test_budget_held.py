"""For how long a choice of the budget holds, and when is learned from the drafts of requests that have ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated_budget import CPU, budget_at, request_of

from specdec_core.budget.budget import Budget
from specdec_core.budget.choice import Expected
from specdec_core.budget.held import MOST_HELD, NUM_HELD
from specdec_core.budget.retries import Retries
from specdec_core.budget.survival import LEVELS
from specdec_core.contracts.draft import Draft


def steps_of_choices(
    budget: Budget, requests: list[Any], num_steps: int, *, numbers: Any, choice_s: float
) -> list[int]:
    """The steps in which a choice was made, if it takes choice_s and is `numbers`, or the next of these."""
    steps, step = list[int](), 0

    def choose(rows: np.ndarray, limits: list[int], so_far: Expected) -> list[int]:
        steps.append(step)
        return list(numbers if isinstance(numbers, list) else next(numbers))

    budget._choose = choose  # type: ignore[method-assign]
    for step in range(num_steps):  # noqa: B007
        budget._choice_s.value = choice_s
        budget.share(requests, [5] * len(requests), Expected.of_plain(len(requests)))
    return steps


@pytest.mark.parametrize(
    ("choice_s", "steps"),
    [
        (0.01, [0, 8, 24, 56, 88]),  # steps with 5 draft tokens take 1.05 s
        (0.425, [0, 20, 52, 84]),
        (99.0, [0, 32, 64, 96]),
    ],
)
def test_a_choice_holds_longer_where_it_takes_longer_and_while_nothing_changes(
    choice_s: float, steps: list[int]
) -> None:
    assert (NUM_HELD, MOST_HELD) == (8, 32)
    request = request_of("a")
    assert steps_of_choices(budget_at(0.01, "a"), [request], 100, numbers=[5], choice_s=choice_s) == steps


def test_a_choice_that_differs_holds_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retries, "is_due", False)
    budget, requests = budget_at(0.01, "a", "b"), [request_of("a"), request_of("b")]
    numbers = iter([[5, 0], [4, 0], [4, 4], [2, 4], [0, 4], [0, 5], [0, 5], [0, 5]])
    assert steps_of_choices(budget, requests, 100, numbers=numbers, choice_s=0.01) == [0, 8, 24, 32, 40, 48, 64, 96]


def test_a_choice_that_ended_early_makes_the_next_one_no_longer() -> None:
    budget, request = budget_at(0.01, "a"), request_of("a")
    assert steps_of_choices(budget, [request], 3, numbers=[5], choice_s=0.01) == [0]
    budget._first._sizes.clear()
    for step in range(9):
        budget._first.add(1, 0.01, step)  # now it is known how long drafts take
    assert steps_of_choices(budget, [request], 26, numbers=[5], choice_s=0.01) == [0, 8, 24]


def test_after_a_retry_is_learned_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retries, "is_due", True)
    budget, requests = budget_at(0.01, "a", "b"), [request_of("a"), request_of("b")]
    assert steps_of_choices(budget, requests, 26, numbers=[5, 0], choice_s=99.0) == [0, 8, 16, 24]


def test_a_choice_holds_on_when_few_others_end() -> None:
    names, numbers = "abcdefgh", [9, 8, 7, 6, 5, 4, 3, 2]
    budget, requests = budget_at(0.01, *names), [request_of(name) for name in names]
    budget._choose = lambda rows, limits, so_far: numbers[: len(rows)]  # type: ignore[method-assign]
    assert budget.share(requests, [9] * 8, Expected.of_plain(8)) == numbers
    left = [*range(8)]
    for i in (3, 6, 0, 7):
        budget.finish(requests[i])
        left.remove(i)
        others = [requests[i] for i in left]
        assert budget.share(others, [9] * len(left), Expected.of_plain(len(left))) == [numbers[i] for i in left]
    budget.finish(requests[1])
    assert budget.share(others[1:], [9] * 3, Expected.of_plain(3)) == numbers[:3], "less than half are left"


def test_a_choice_holds_on_while_a_request_may_not_draft() -> None:
    """As before its last token."""
    budget, requests, chosen = budget_at(0.01, *"abcd"), [request_of(name) for name in "abcd"], []
    budget._choose = lambda rows, limits, so_far: chosen.append(1) or [5, 4, 3, 2]  # type: ignore[func-returns-value]
    for limits in ([9, 9, 9, 9], [9, 0, 9, 9], [9, 9, 9, 9]):
        found = budget.share(requests, limits, Expected.of_plain(4))
        assert found == [number if limit else 0 for number, limit in zip([5, 4, 3, 2], limits, strict=True)]
    assert len(chosen) == 1


@pytest.mark.parametrize(
    ("numbers", "left"),
    [
        ([9, 0, 0, 0, 0], "bcde"),
        ([9, 9, 9, 0, 0], "cde"),
        ([0, 9, 9, 9, 0], "ade"),
        ([9, 0, 0, 0, 0], "ab"),
        ([0] * 5, "abcd"),
    ],
)
def test_a_choice_does_not_hold_if_few_are_left(numbers: list[int], left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retries, "is_due", False)
    budget, requests = budget_at(0.01, *"abcde"), [request_of(name) for name in "abcde"]
    given = iter([numbers, [1, 2, 3, 4][: len(left)]])
    budget._choose = lambda rows, limits, so_far: next(given)  # type: ignore[method-assign]
    assert budget.share(requests, [9] * 5, Expected.of_plain(5)) == numbers
    for request in requests:
        if request.id not in left:
            budget.finish(request)
    others = [request for request in requests if request.id in left]
    assert budget.share(others, [9] * len(left), Expected.of_plain(len(left))) == [1, 2, 3, 4][: len(left)]


def drafted(budget: Budget, *requests: Any, is_right: bool) -> None:
    """A step in which each request drafts one token, which is accepted or not."""
    ones = [1] * len(requests)
    assert budget.share(requests, ones, Expected.of_plain(len(ones))) == ones
    budget.levels(ones, CPU)
    budget.keep(Draft.from_chains([[7]] * len(ones)))
    for request in requests:
        request.token_ids = np.append(request.token_ids, [7, 7] if is_right else [2])


def test_of_requests_that_ended_is_learned_before_others_take_their_rows() -> None:
    budget, ends, goes_on = budget_at(0.01, "a", "b"), request_of("a"), request_of("b")
    tried, accepted = budget.survival._rates._tried, budget.survival._rates._accepted
    drafted(budget, ends, is_right=True)
    budget.finish(ends)
    assert tried[0, LEVELS] == 0, "it is put off"
    row = budget.survival.rows([ends]).item()
    budget.start(new := request_of("c"), is_sampled=True, may_sample=True)
    assert budget.survival.rows([new]).item() == row
    assert (tried[0, LEVELS], accepted[0, LEVELS]) == (1, 1), "of the group of the request that had the row"
    assert not tried[2].any()
    drafted(budget, goes_on, is_right=False)
    budget.finish(goes_on)
    budget.finish(new)
    assert tried[0, LEVELS] == pytest.approx(2, rel=1e-3), "not put off if no request is left"
    assert budget.survival.num_requests == 0
    assert not budget._unlearned.ended
    assert not budget._unlearned.past


def test_nothing_is_learned_where_the_device_may_have_failed() -> None:
    budget, first, second = budget_at(0.01, "a", "b"), request_of("a"), request_of("b")
    drafted(budget, first, second, is_right=True)
    budget.finish(first)
    budget.finish(second, learns=False)
    assert not budget.survival._rates._tried.any()
    assert budget.survival.num_requests == 0


@pytest.mark.parametrize("learns", [True, False])
def test_an_id_may_come_again(learns: bool) -> None:
    """The new request may have another row, and belong to another group."""
    budget, first = budget_at(0.01, "a", "b"), request_of("a")
    tried = budget.survival._rates._tried
    drafted(budget, first, is_right=True)
    budget.finish(first, learns=learns)
    budget.start(again := request_of("a"), is_sampled=True, may_sample=True)
    assert tried[0, LEVELS] == learns
    assert budget.survival.num_requests == 2
    drafted(budget, again, is_right=True)
    budget.finish(again)
    budget.pass_step()
    assert tried[:, LEVELS].tolist() == [pytest.approx(int(learns), rel=1e-3), 0, 1]


@pytest.mark.parametrize("is_asked", [True, False])
def test_requests_that_ended_are_not_kept_alive(is_asked: bool) -> None:
    """Though others go on, which may not draft."""
    budget, ends, goes_on = budget_at(0.01, "a", "b"), request_of("a"), request_of("b")
    drafted(budget, ends, is_right=True)
    budget.finish(ends)
    assert budget._unlearned.ended
    if is_asked:
        assert budget.share([goes_on], [0], Expected.of_plain(1)) == [0]
    else:
        budget.pass_step()
    assert not budget._unlearned.ended
    assert not budget._unlearned.past
    assert budget.survival._rates._tried[0, LEVELS] == 1
