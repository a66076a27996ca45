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
        budget._choice_s = choice_s
        budget.share(requests, [5] * len(requests), Expected.of_plain(len(requests)))
    return steps


@pytest.mark.parametrize(
    ("choice_s", "steps"),
    [
        (0.01, [0, 8, 24, 56, 88]),  # steps take 1 s
        (0.4, [0, 20, 52, 84]),
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
    numbers = iter([[5, 0], [4, 0], [5, 5], [0, 5], [0, 5], [0, 5], [0, 5]])
    assert steps_of_choices(budget, requests, 100, numbers=numbers, choice_s=0.01) == [0, 8, 24, 32, 40, 56, 88]


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
    for i in (3, 6):
        budget.finish(requests[i])
        left.remove(i)
        others = [requests[i] for i in left]
        assert budget.share(others, [9] * len(left), Expected.of_plain(len(left))) == [numbers[i] for i in left]
    budget.finish(requests[0])
    assert budget.share(others[1:], [9] * 5, Expected.of_plain(5)) == numbers[:5], "fewer than 3 of 4 are left"


def drafted(budget: Budget, request: Any, *, is_right: bool) -> None:
    """A step in which the request drafts one token, which is accepted or not."""
    assert budget.share([request], [1], Expected.of_plain(1)) == [1]
    budget.levels([1], CPU)
    budget.keep(Draft.from_chains([[7]]))
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
    assert not budget._ended
    assert not budget._past


def test_nothing_is_learned_of_a_request_whose_device_may_have_failed() -> None:
    budget, ends, goes_on = budget_at(0.01, "a", "b"), request_of("a"), request_of("b")
    drafted(budget, ends, is_right=True)
    budget.finish(ends, learns=False)
    budget.finish(goes_on)
    assert not budget.survival._rates._tried.any()
    assert budget.survival.num_requests == 0


def test_an_id_may_come_again() -> None:
    budget, first = budget_at(0.01, "a", "b"), request_of("a")
    drafted(budget, first, is_right=True)
    budget.finish(first)
    budget.start(again := request_of("a"), is_sampled=False)
    assert budget.survival.num_requests == 2
    drafted(budget, again, is_right=True)
    budget._held = None
    budget.share([again], [1], Expected.of_plain(1))
    assert budget.survival.num_requests == 2, "the new request has not ended"
