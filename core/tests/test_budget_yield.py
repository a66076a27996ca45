"""When the budget starts and stops drafting: what drafts really yield, and what it costs to begin."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from naive_verifier import draft_of
from simulated_budget import CPU, budget_at, request_of

from specdec_core.budget import budget as budgets, cost_curve
from specdec_core.budget.budget import Budget
from specdec_core.budget.choice import Expected
from specdec_core.budget.cost_curve import CostCurve
from specdec_core.budget.plain_steps import PlainSteps
from specdec_core.budget.recent import Average
from specdec_core.budget.survival import ANY, GUESS, REACHED, Past, Survival
from specdec_core.contracts.draft import Draft


def budget_of(*names: str, node: float = 0.01) -> Budget:
    return budget_at(node, *names)


def learned(draft: Draft, num_right: int, limit: int) -> Survival:
    """After many drafts of which the first num_right levels were accepted. All draft tokens are 7."""
    survival, request = Survival(1), request_of()
    survival.start(request, is_sampled=False)
    for _ in range(200):
        number = len(request.token_ids)
        request.token_ids = np.append(request.token_ids, [7] * num_right + [1])
        survival.learn([Past([request], np.array([0]), [number], [limit], draft)])
    survival.update(np.array([0]))
    return survival


def test_a_level_that_was_not_drafted_yields_nothing() -> None:
    survival, rows = learned(Draft.from_chains([[7, 7]]), 2, limit=5), np.array([0])
    assert survival.of_depths(rows, 3)[0] == pytest.approx([1, 1, 0], abs=0.1)
    assert survival.of_levels(rows, 0, 3)[0] == pytest.approx([1, 1, GUESS], abs=0.15), "if it was drafted, it might"


def test_a_level_beyond_the_limit_is_not_missed() -> None:
    survival = learned(Draft.from_chains([[7, 7]]), 2, limit=2)
    assert survival.of_depths(np.array([0]), 3)[0] == pytest.approx([1, 1, GUESS], abs=0.15)


def test_a_tree_that_has_used_up_its_draft_tokens_yields_no_deeper_level() -> None:
    survival = learned(draft_of([([7, 8, 7, 8], [-1, -1, 0, 0])]), 2, limit=4)
    assert survival.of_depths(np.array([0]), 3)[0] == pytest.approx([1, 1, 0], abs=0.1)


def test_a_rejected_level_is_counted_once() -> None:
    survival = learned(Draft.from_chains([[7, 7, 7]]), 1, limit=9)
    assert survival._rates._tried[:, REACHED:ANY].sum() == pytest.approx(400, rel=0.01)
    assert survival.of_depths(np.array([0]), 2)[0] == pytest.approx([1, 0], abs=0.1)


@pytest.mark.parametrize(("text", "num_missed"), [([7], 0), ([7, 7], 0), ([7, 7, 3], 1), ([7, 3, 3], 0)])
def test_a_level_was_missed_if_the_text_goes_on_after_the_draft(text: list[int], num_missed: int) -> None:
    """Of drafts that are longer than the text, it is not known whether their next token is right, either."""
    survival, request = Survival(1), request_of("a")
    survival.start(request, is_sampled=False)
    number = len(request.token_ids)
    request.token_ids = np.append(request.token_ids, text)
    survival.learn([Past([request], np.array([0]), [number], [9], Draft.from_chains([[7, 7]]))])
    assert survival._rates._tried[0, REACHED + 2] == num_missed


@pytest.mark.parametrize("how", ["_asks_levels", "_judges_nodes"])
def test_a_proposer_whose_drafts_vary_in_length_is_judged_by_what_they_yield(how: str) -> None:
    """Its levels are nearly always right, but it drafts few, and each draft costs as much as a plain step."""
    budget, request = budget_of("any"), request_of()
    setattr(budget, how, True)
    budget._levels_per_draft.value = 0.0
    for step in range(20):
        budget._first.add(1, 1.2, step)
    yields = []
    for num_levels in (1, 4):
        for _ in range(200):
            number = len(request.token_ids)
            request.token_ids = np.append(request.token_ids, [7] * num_levels + [1])
            budget._unlearned.past.append(
                Past([request], np.array([0]), [number], [9], Draft.from_chains([[7] * num_levels]))
            )
        budget._held = None
        yields.append(budget._numbers([request], [9], Expected.of_plain(1)))
    assert yields == [[0], [9]]


@pytest.mark.parametrize(("saved", "goes_on", "starts"), [(0.08, False, False), (0.12, True, False), (0.2, True, True)])
def test_to_start_takes_more_than_to_go_on(
    saved: float, goes_on: bool, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "best_levels", lambda gains, *_: (np.ones(len(gains), dtype=np.int64), saved))
    for was_off, drafts in ((False, goes_on), (True, starts)):
        budget = budget_of("a")
        budget.idle._is_all_off = was_off
        (number,) = budget._choose(np.array([0]), [5], Expected.of_plain(1))
        assert bool(number) == drafts
        assert bool(budget.saved_share) == drafts


@pytest.mark.parametrize(("saved_share", "number"), [(0.05, 40), (0.6, 5)])
def test_plain_steps_are_measured_in_a_row_and_the_rarer_the_more_a_draft_saves(
    saved_share: float, number: int
) -> None:
    curve = CostCurve({1: 1.0, 8: 1.1}, 16)
    plain, taken = PlainSteps(curve), []
    for _ in range(2500):
        taken.append(plain.takes(1, saved_share))
        curve.add(1, 1 if taken[-1] else 6, 1.0)
        plain.end_steps(1.0)
    runs = "".join("x" if each else " " for each in taken).split()
    assert {len(run) for run in runs} == {cost_curve.LEAST_COLD + cost_curve.NUM_NEEDED}, "these steps are long"
    assert len(runs) == number
    assert not any(PlainSteps(curve).takes(1, 0.0) for _ in range(9)), "nothing is drafted anyway"


def test_plain_steps_are_broken_off_by_a_prompt() -> None:
    plain = PlainSteps(curve := CostCurve({1: 1.0, 8: 1.1}, 16))
    for _ in range(cost_curve.NUM_UNMEASURED + 1):
        curve.add(1, 6, 1.0)
    assert plain.takes(1, 0.1)
    plain.break_off()
    assert not plain.takes(1, 0.1), "the next ones are not paid for yet"


def test_what_was_cut_is_neither_gained_nor_paid_for() -> None:
    """Each token costs more than it gains, so nothing is kept. Then drafting must not seem to gain for nothing."""
    budget, request = budget_of("a", node=0.9), request_of("a")
    budget._asks_levels = True
    choose, budget._choose = budget._choose, lambda rows, limits, so_far: limits  # type: ignore[method-assign]
    for _ in range(60):
        budget._num_steps = budgets.NUM_BETWEEN_CUTS  # so that they are judged
        budget.share([request], [9], Expected.of_plain(1))
        budget.levels([9], CPU)
        budget.keep(attrs.evolve(Draft.from_chains([[5, 5]]), scores=torch.tensor([0.3, 0.3])))
    assert budget._kept_gain.value == pytest.approx(0, abs=0.01)
    assert choose(np.array([0]), [9], Expected.of_plain(1)) == [0]


def test_levels_per_draft_include_drafts_of_one_level() -> None:
    budget, request = budget_of("a"), request_of("a")
    one = np.zeros(1, dtype=np.int64)
    for _ in range(100):
        budget._choose = lambda rows, limits, so_far: limits  # type: ignore[method-assign]
        budget.share([request], [9], Expected.of_plain(1))
        levels = budget.levels([9], CPU)
        assert levels is not None
        levels._limits_of = [1]  # the draft ends after a level
        assert not levels.goes_on(one, one, np.array([0.9]), np.array([False]), np.array([1])).any()
        budget.keep(Draft.from_chains([[5]]))
        budget.end_drafting(0.1, 0.0)
    assert budget._levels_per_draft.value == pytest.approx(0, abs=0.01)


def test_no_levels_are_chosen_that_a_proposer_without_scores_does_not_draft() -> None:
    budget = budget_of("a")
    budget.survival = learned(Draft.from_chains([[7, 7]]), 2, limit=9)
    numbers = budget._choose(np.array([0]), [9], Expected.of_plain(1))
    assert not budget._lengths_vary
    assert numbers == [2]


def test_the_first_values_of_an_average_count_equally() -> None:
    """Else drafts would seem to have fewer levels at first, and to take less time."""
    average, found = Average(1.0, 0.25), []
    for value in (6.0, 8.0, 7.0, 7.0, 3.0, 7.0):
        average.add(value)
        found.append(average.value)
    assert found == pytest.approx([6, 7, 7, 7, 6, 6.25])


def test_a_draft_of_one_token_does_not_hide_that_a_proposer_asks() -> None:
    budget, request = budget_of("a"), request_of("a")
    budget._asks_levels = True
    budget._choose = lambda rows, limits, so_far: limits  # type: ignore[method-assign]
    budget.share([request], [1], Expected.of_plain(1))
    budget.levels([1], CPU)
    budget.keep(Draft.from_chains([[5]]))
    assert budget._asks_levels


def test_a_step_without_a_draft_is_not_charged_for_draft_tokens() -> None:
    """The first further token doubles the time, and the next ones take none. A draft is found in 3 of 10 steps."""
    budget = Budget(CostCurve({1: 1.0, 2: 2.0, 64: 2.01}, 64), 1, 9, in_place=False)
    budget.start(request_of("a"), is_sampled=False)
    budget.survival._rates.estimates[:, ANY] = 0.3
    assert budget._choose(np.array([0]), [9], Expected.of_plain(1)) == [9]
    assert budget.saved_share == pytest.approx(1 - 1.3 / (1 + 0.3 * sum(GUESS**n for n in range(1, 10))), abs=0.01)


def test_in_a_large_batch_some_request_finds_a_draft() -> None:
    """So the forward pass is not slower than with drafts: no request pays for that."""
    budget = Budget(curve := CostCurve({1: 1.0, 64: 1.001}, 64), 8, 9, in_place=False)
    for name in "abcdefgh":
        budget.start(request_of(name), is_sampled=False)
    for _ in range(30):
        curve.add_empty(8, 9.0)
    rows = np.arange(8)
    budget.survival._rates.estimates[:, ANY] = 0.5
    assert curve.empty_s > 1
    assert all(budget._choose(rows, [9] * 8, Expected.of_plain(8)))


def test_choosing_is_a_part_of_what_drafts_cost() -> None:
    budget, rows = budget_of("a"), np.zeros(1, dtype=np.int64)
    assert budget._choose(rows, [9], Expected.of_plain(1)) != [0]
    budget._choice_s.value = 99.0
    assert budget._choose(rows, [9], Expected.of_plain(1)) == [0]


def test_drafts_of_several_proposers_may_be_larger_than_the_table() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0}, 8)
    assert curve.at(1, 99) == curve.at(1, 8) == 2.0
    assert curve.more_s(1, 7, 50) == pytest.approx(curve.at(1, 8) - curve.at(1, 7))
