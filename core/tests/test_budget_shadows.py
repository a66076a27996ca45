"""Requests that do not draft are tried in shadow: draft tokens are compared with the text, and not verified."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from simulated_budget import CPU, request_of

from specdec_core import LLM, SamplingParams
from specdec_core.budget import retries
from specdec_core.budget.budget import NUM_VAIN, Budget
from specdec_core.budget.choice import Expected
from specdec_core.budget.cost_curve import CostCurve
from specdec_core.budget.held import Held
from specdec_core.budget.idle import Idle
from specdec_core.budget.retries import LEAST_RARE, MOST_FOLLOWING, MOST_TOGETHER, NUM_SHADOWED, Retries
from specdec_core.budget.survival import LEVELS
from specdec_core.budget.unlearned import MOST_AWAITED
from specdec_core.contracts.draft import Draft

NAMES = "abcdefgh"


def budget_that_is_off(
    *, drafting_s: float = 0.01, observes: bool = False, drafts: str = ""
) -> tuple[Budget, list[Any]]:
    """A budget of 8 requests, of which only those named in `drafts` draft. A step takes 1 s, and 1 s more with 16 draft
    tokens."""
    budget = Budget(CostCurve({1: 1.0, 8: 1.0, 24: 2.0}, 128), len(NAMES), 9, in_place=False, observes=observes)
    requests = [request_of(name) for name in NAMES]
    for request in requests:
        budget.start(request, is_sampled=False)
    for step in range(9):
        budget._first.add(len(NAMES), drafting_s, step)
        budget._first.add(MOST_TOGETHER, min(drafting_s, 0.01), step)
    budget._is_chosen_on_host = True
    budget._choose = lambda rows, limits, so_far: [9 * (name in drafts) for name in NAMES[: len(rows)]]  # type: ignore[method-assign]
    return budget, requests


def try_again(
    budget: Budget, requests: list[Any], step_s: float = 1.0, *, verifies: bool | None = True, **changes: Any
) -> Draft:
    """A step with retries that are due. Returns what is verified. verifies: whether it is the turn of a few; None: the
    budget decides."""
    budget.retries._debt._owed_s = 0.0
    if verifies is not None:
        budget.retries._num_shadowed = NUM_SHADOWED * verifies
    limits = budget.share(requests, [5] * len(requests), Expected.of_plain(len(requests)))
    drafting = [limit for limit in limits if limit]
    assert budget.retries.number
    budget.levels(drafting, CPU)
    kept = budget.keep(attrs.evolve(Draft.from_chains([[7] * limit for limit in drafting]), **changes))
    budget.end_drafting(0.5, 0.0)
    budget.end_steps([step_s], len(requests), {})
    return kept


def emit(requests: list[Any], *token_ids: int) -> None:
    for request in requests:
        request.token_ids = np.append(request.token_ids, token_ids)


def test_all_requests_draft_and_a_few_are_verified() -> None:
    budget, requests = budget_that_is_off()
    tried, accepted = budget.survival._rates._tried[0], budget.survival._rates._accepted[0]
    kept = try_again(budget, requests)
    assert kept.num_nodes_per_request == [4] * 4 + [0] * 4
    emit(requests[:6], 7, 7, 2)
    emit(requests[6:], 3, 7, 7)
    budget._learn()
    assert not tried.any(), "up to 5 tokens were drafted"
    emit(requests, 3, 3, 3)
    budget._learn()
    assert tried[LEVELS : LEVELS + 3] == pytest.approx([8, 6, 6], rel=1e-3)
    assert accepted[LEVELS : LEVELS + 3] == pytest.approx([6, 6, 0], rel=1e-3)
    assert try_again(budget, requests).num_nodes_per_request == [0] * 4 + [4] * 4


def test_most_retries_verify_nothing() -> None:
    budget, requests = budget_that_is_off()
    verified = []
    for _ in range(2 * NUM_SHADOWED + 2):
        kept = try_again(budget, requests, verifies=None)
        assert len(budget.retries.ids) + len(budget.retries.shadows) == len(NAMES)
        verified.append(kept.num_nodes)
    assert verified == 2 * [*[0] * NUM_SHADOWED, 4 * MOST_TOGETHER]


def rest_of(budget: Budget, requests: list[Any]) -> None:
    """A step for which the budget is asked in vain."""
    assert not any(budget.share(requests, [5] * len(requests), Expected.of_plain(len(requests))))
    budget.idle.begin(requests)


@pytest.mark.parametrize(("token_id", "gains"), [(7, True), (3, False)])
def test_it_is_decided_again_where_the_text_shows_a_gain(token_id: int, gains: bool) -> None:
    budget, requests = budget_that_is_off()
    try_again(budget, requests, verifies=False)
    rest_of(budget, requests)
    for number in range(6, 0, -1):
        assert budget.num_awaited == number
        assert budget.stays_idle(requests)
        budget.pass_step()
        emit(requests, token_id)
    budget.retries._debt.add(1e3)  # what is shown is followed by no retry
    for _ in range(2):  # the engine asks more than once in a step
        assert budget.stays_idle(requests) != gains
    assert budget.num_awaited is None
    assert not budget.survival._rates._tried.any()
    budget.retries._debt.add(1e3)
    rest_of(budget, requests)
    assert bool(budget.survival._rates._tried[0, LEVELS]) == gains
    assert budget.stays_idle(requests), "there is no more to learn"


def test_it_is_decided_again_after_some_vain_retries() -> None:
    budget, requests = budget_that_is_off()
    choose, chosen, num_chosen = budget._choose, list[None](), list[int]()
    budget._choose = lambda *args: chosen.append(None) or choose(*args)  # type: ignore[method-assign,func-returns-value]
    for _ in range(2 * NUM_VAIN):
        budget.retries._debt.add(1e-9)
        try_again(budget, requests, verifies=None)
        budget.idle.begin(requests)
        emit(requests, *[3] * 6)
        budget.retries._debt.add(1e3)
        assert budget.stays_idle(requests)
        budget.pass_step()
        num_chosen.append(len(chosen))
    assert num_chosen == [1] * NUM_VAIN + [2] * NUM_VAIN
    assert budget.survival._rates._tried[0, LEVELS] > 0


def test_the_retry_after_one_that_would_have_gained_is_verified() -> None:
    budget, requests = budget_that_is_off()
    try_again(budget, requests, verifies=False)
    emit(requests, *[7] * 6)
    assert not budget.stays_idle(requests)
    assert try_again(budget, requests, verifies=None).num_nodes == 4 * MOST_TOGETHER


def test_a_retry_that_would_have_gained_is_followed_by_others() -> None:
    budget, requests = budget_that_is_off()
    num_tried = 0
    for _ in range(100):
        budget._curve.add(len(NAMES), len(NAMES), 1.0)
        if budget.stays_idle(requests):
            budget.pass_step()
        else:
            limits = budget.share(requests, [5] * len(requests), Expected.of_plain(len(requests)))
            if any(limits):
                num_tried += 1
                budget.levels(limits, CPU)
                budget.keep(Draft.from_chains([[7] * 5] * len(NAMES)))
                budget.end_drafting(0.01, 0.0)
                budget.end_steps([1.0], len(NAMES), {})
                budget.retries._debt.add(1e3)
            else:
                budget.idle.begin(requests)
        emit(requests, 7)
    assert num_tried == 1 + MOST_FOLLOWING


def test_a_choice_does_not_hold_once_the_text_is_known() -> None:
    """Else it would be asked for in each of the steps for which it holds."""
    budget, requests = budget_that_is_off()
    try_again(budget, requests)
    budget.retries._debt.add(9.0)
    rest_of(budget, requests)
    assert budget._held is not None
    emit(requests, *[3] * 6)
    rest_of(budget, requests)
    assert budget.num_awaited is None


@pytest.mark.parametrize("num_found", [0, 3])
def test_new_requests_stay_off_while_nothing_is_found(num_found: int) -> None:
    budget, requests = budget_that_is_off(observes=True)
    budget.idle.decide(requests, [0] * 8)
    limits = budget.share(requests, [5] * 8, Expected.of_plain(8))
    budget.levels([limit for limit in limits if limit], CPU)
    budget.keep(Draft.from_chains([[7] * num_found] * MOST_TOGETHER))
    emit(requests, 7, 7)
    budget._learn()
    assert bool(budget.idle._new_off) == (not num_found)


@pytest.mark.parametrize(("following", "gains"), [((7,) * 6, True), ((7, *[3] * 5), False)])
def test_new_requests_stay_off_until_a_retry_would_have_gained(following: tuple[int, ...], gains: bool) -> None:
    budget, requests = budget_that_is_off()
    budget.idle.decide(requests, [0] * len(requests))
    try_again(budget, requests, verifies=False)
    emit(requests, *following)
    budget._learn()
    assert bool(budget.idle._new_off) != gains


def test_an_engine_at_rest_decides_again_once_the_text_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would rest for more steps, in which the budget is not asked."""
    steps, asked = list[int](), list[tuple[int, bool]]()  # asked: in which of them, and whether there were shadows
    share = Budget.share

    def noted(budget: Budget, *args: Any) -> list[int]:
        limits = share(budget, *args)
        asked.append((steps[-1], bool(budget.retries.shadows)))
        return limits

    monkeypatch.setattr(Budget, "share", noted)
    monkeypatch.setattr(Budget, "_choose", lambda self, rows, limits, so_far: [0] * len(rows))
    monkeypatch.setattr(Budget, "_has_shadows", lambda self, numbers: True)
    monkeypatch.setattr(Budget, "_settle", lambda self: bool(self._unlearned.settle()))  # as if it gained
    # There is one retry, and costs, which depend on the machine, wake nothing.
    monkeypatch.setattr(Retries, "is_due", property(lambda self: not any(had_shadows for _, had_shadows in asked)))
    monkeypatch.setattr(Retries, "num_until_due", lambda self, step_s: sys.maxsize)
    monkeypatch.setattr(Idle, "_is_cheaper", lambda self: False)
    with LLM("tiny", speculative_config={"method": "ngram"}) as llm:
        for name in "abcde":
            token_ids = llm.get_tokenizer().encode(f"def {name}(left, right):\n" * 6)
            llm.engine.add_request(token_ids, SamplingParams(max_tokens=99, ignore_eos=True))
        for step in range(60):
            steps.append(step)
            llm.engine.step()
    tried = next(i for i, (_, has_shadows) in enumerate(asked) if has_shadows)
    before, known = (step for step, _ in asked[tried : tried + 2])
    assert 1 < known - before <= MOST_AWAITED + 1, "it rests after a retry of which nothing is verified"


def test_a_preempted_shadow_does_not_wake_the_others() -> None:
    budget, requests = budget_that_is_off()
    try_again(budget, requests, verifies=False)
    budget.retries._debt.add(9.0)
    rest_of(budget, requests)
    for _ in range(20):
        emit(requests[1:], 7)
        assert budget.stays_idle(requests)


def test_of_a_shadow_is_learned_when_a_request_ends() -> None:
    budget, requests = budget_that_is_off()
    try_again(budget, requests)
    emit(requests, 7)
    budget.finish(requests[0])
    budget._learn()
    assert not budget._unlearned.past
    assert budget.survival._rates._tried[0, LEVELS] == 8


@pytest.mark.parametrize("learns", [True, False])
def test_shadows_of_requests_that_are_gone_do_not_wait(learns: bool) -> None:
    budget, requests = budget_that_is_off()
    try_again(budget, requests)
    for request in requests:
        budget.finish(request, learns=learns)
    assert not budget._unlearned.past


def test_requests_that_draft_are_verified_meanwhile() -> None:
    budget, requests = budget_that_is_off(drafts="bf")
    kept = try_again(budget, requests)
    assert (budget.retries.ids, budget.retries.shadows) == ([*"acde"], [*"gh"])
    assert kept.num_nodes_per_request == [4, 5, 4, 4, 4, 5, 0, 0]


def test_shadows_pay_for_drafting() -> None:
    budget, requests = budget_that_is_off(drafting_s=0.5, drafts="bf")
    budget._held = Held.of(
        [*NAMES], [5] * 8, [9 * (n in "bf") for n in NAMES], is_beside=False, is_informed=True, least=9, before=None
    )
    num_verified = try_again(budget, requests).num_nodes
    verified_s = budget._curve.more_s(8, 8, round(num_verified * 4 / 6))  # 4 are tried, and 2 draft anyway
    cost_s = 0.5 * 6 / 8 + verified_s
    assert budget.retries._debt._owed_s == pytest.approx(cost_s * LEAST_RARE)


def test_retries_that_would_have_gained_pay_for_the_choice_that_follows() -> None:
    tried = Retries()
    for gained_s, owed_s, num_vain in ((0.9, 0.0, 3), (1.1, 0.25, 0)):
        tried.num_vain = 3
        tried.show(gained_s, 1.0, 0.25)
        assert (tried._debt._owed_s, tried.num_vain) == (owed_s, num_vain)


@pytest.mark.parametrize(
    "change",
    [
        {"drafting_s": 2.1},  # 8 requests; 4 take 0.01 s, and verifying 16 tokens 1 s
        {"observes": True},
    ],
)
def test_where_drafting_costs_more_a_few_are_verified(change: dict[str, Any]) -> None:
    budget, requests = budget_that_is_off(**change)
    try_again(budget, requests)
    assert budget.retries.ids
    assert not budget.retries.shadows


def test_one_request_is_tried_in_shadow_though_a_few_would_take_no_longer() -> None:
    budget, requests = budget_that_is_off()
    for step in range(9):
        budget._first.add(1, 0.5, step)
    budget._curve.more_s = lambda *_: 0.1  # type: ignore[method-assign]
    try_again(budget, requests[:1], verifies=False)
    assert budget.retries.shadows


@pytest.mark.parametrize("how", ["_asks_levels", "_is_chosen_on_host"])
def test_drafts_that_need_verification_are_verified(how: str) -> None:
    budget, requests = budget_that_is_off()
    setattr(budget, how, how == "_asks_levels")
    try_again(budget, requests)
    assert not budget.retries.shadows


@pytest.mark.parametrize("verifies", [True, False])
def test_few_requests_are_all_verified_or_all_in_shadow(verifies: bool) -> None:
    budget, requests = budget_that_is_off()
    kept = try_again(budget, requests[:MOST_TOGETHER], verifies=verifies)
    assert kept.num_nodes_per_request == [4 * verifies] * MOST_TOGETHER
    assert len(budget.retries.shadows) == MOST_TOGETHER * (not verifies)


def test_a_sampled_draft_shows_that_the_next_ones_are_verified() -> None:
    budget, requests = budget_that_is_off()
    q = {"q": torch.full((36, 9), 1 / 9), "q_rows": torch.arange(36, dtype=torch.int32)}
    assert try_again(budget, requests, **q).num_nodes == 4 * MOST_TOGETHER
    assert not budget._unlearned.past, "the text would not show how often they are accepted"
    try_again(budget, requests)
    assert not budget.retries.shadows


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_output_is_that_of_plain_decoding(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing drafts but retries and shadows."""
    shadows = []
    without_shadows = Budget._without_shadows
    monkeypatch.setattr(Budget, "_choose", lambda self, rows, limits, so_far: [0] * len(rows))
    monkeypatch.setattr(Budget, "_has_shadows", lambda self, numbers: True)
    monkeypatch.setattr(retries, "MOST_TOGETHER", 1)
    monkeypatch.setattr(Retries, "is_due", True)
    monkeypatch.setattr(
        Budget, "_without_shadows", lambda self, draft: shadows.append(draft.num_nodes) or without_shadows(self, draft)
    )
    prompts = ["for i in range(10):\n    print(i)\n" * 4, "def add(left, right):\n", "import os\nimport sys\n" * 6]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    found = {}
    for config in (None, {"method": method}):
        with LLM("tiny", speculative_config=config) as llm:
            found[str(config)] = [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
    assert sum(shadows) > 50
    assert len({*map(str, found.values())}) == 1
