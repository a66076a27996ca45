"""The budget of a step: which requests draft, how much, by what was learned of their drafts and by measured costs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from naive_verifier import draft_of

from specdec_core.budget import budget as budgets, clock, rates, retries
from specdec_core.budget.budget import Budget
from specdec_core.budget.choice import Expected
from specdec_core.budget.cost_curve import NUM_BETWEEN, CostCurve
from specdec_core.budget.nodes import Nodes, without
from specdec_core.budget.recent import NUM_NEEDED
from specdec_core.budget.retries import Retries
from specdec_core.budget.survival import Past, Survival
from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.engine.draft_check import check_draft

CPU = torch.device("cpu")


NOTHING: Mapping[str, int] = MappingProxyType({})


def request_of(name: str = "any", num_tokens: int = 5) -> Any:
    return SimpleNamespace(id=name, token_ids=np.zeros(num_tokens, dtype=np.int64))


# What is cut after drafting


def budget_at(node: float, *names: str, in_place: bool = False, most: int = 9) -> Budget:
    """A budget of these requests, for which another token in the forward pass costs `node` times the first one."""
    curve = CostCurve({1: 1.0, 2: 1.0 + node}, 64)
    budget = Budget(curve, len(names), most, in_place=in_place)
    for name in names:
        budget.start(request_of(name), is_sampled=False)
    return budget


def kept(budget: Budget, names: str, draft: Draft) -> Draft:
    requests = [request_of(name) for name in names]
    budget._asks_levels = True
    assert all(budget.share(requests, [9] * len(names), Expected.of_plain(len(names), len(names))))
    budget.levels([9] * len(names), CPU)
    return budget.keep(draft)


@pytest.mark.parametrize("in_place", [True, False])
def test_chosen_nodes_that_are_not_worth_a_row_go(in_place: bool) -> None:
    draft = attrs.evolve(
        draft_of([([5, 6, 7, 8], [-1, -1, 0, 2]), ([5, 6], [-1, 0]), ([9], [-1])]),
        scores=torch.tensor([0.9, 0.001, 0.9, 0.001, 0.9, 0.9, 0.001]),
    )
    cut = kept(budget_at(0.05, *"abc", in_place=in_place), "abc", draft)
    check_draft(cut, [9, 9, 9], 10, CPU)
    first = ([5, 6, 7], [-1, -1, 0]) if in_place else ([5, 7], [-1, 0])
    assert [cut.tree(b) for b in range(3)] == [first, ([5, 6], [-1, 0]), ([], [])]
    assert cut.max_depth == 2


@pytest.mark.parametrize("in_place", [True, False])
def test_dead_nodes_are_worth_nothing(in_place: bool) -> None:
    draft = attrs.evolve(
        draft_of([([5, 6, 7, 8, 9], [-1, DEAD, 0, 1, DEAD]), ([5], [DEAD]), ([9, 9], [DEAD, 0])]),
        scores=torch.tensor([0.9] * 8),
    )
    cut = kept(budget_at(0.05, *"abc", in_place=in_place), "abc", draft)
    check_draft(cut, [9, 9, 9], 10, CPU)
    first = ([5, 6, 7], [-1, DEAD, 0]) if in_place else ([5, 7], [-1, 0])
    assert [cut.tree(b) for b in range(3)] == [first, ([], []), ([], [])]
    assert cut.num_live_per_request == [2, 0, 0]
    assert cut.max_depth == 2


def test_sampled_nodes_stay() -> None:
    draft = attrs.evolve(
        draft_of([([5, 6], [-1, 0]), ([5, 6], [-1, 0])]),
        scores=torch.tensor([0.001, 0.001, 0.001, 0.001]),
        q=torch.ones(2, 9) / 9,
        q_rows=torch.tensor([0, 1, -1, -1], dtype=torch.int32),
    )
    cut = kept(budget_at(0.5, *"ab"), "ab", draft)
    assert cut.num_nodes_per_request == [2, 0]


def test_dead_nodes_are_not_learned_from() -> None:
    draft = attrs.evolve(draft_of([([7, 7, 8], [DEAD, -1, 1])]), scores=torch.tensor([0.01, 0.9, 0.9]))
    survival, request = Survival(1), request_of()
    survival.start(request, is_sampled=False)
    request.token_ids = np.array([0] * 5 + [7, 8, 1])
    survival.learn([Past([request], np.array([0]), [5], [99], draft)])
    assert survival._nodes._tried.sum() == 2
    sampled = attrs.evolve(draft, q=torch.ones(1, 9) / 9, q_rows=torch.tensor([0, 0, -1], dtype=torch.int32))
    assert Nodes.of(sampled).is_first.tolist() == [False, True, False]


def test_a_draft_may_be_one_dead_node() -> None:
    draft = attrs.evolve(draft_of([([7], [DEAD])]), max_depth=3)
    assert Nodes.of(draft).depths.tolist() == [0]


def test_without_keeps_the_rest_of_the_tree() -> None:
    draft = draft_of([([5, 6, 7], [-1, 0, 1]), ([8, 9], [-1, -1])])
    cut = without(draft, Nodes.of(draft), np.array([True, True, False, False, True]))
    assert [cut.tree(b) for b in range(2)] == [([5, 6], [-1, 0]), ([9], [-1])]


# What is learned


class Simulated:
    """A simulated engine with one request, whose proposer drafts chains.

    node, draft: the cost of another token in the forward pass, and of drafting. A forward pass costs 1.
    score: of all draft tokens; None: they have none.

    Attribute: found, the share of steps in which there is any draft token.
    """

    def __init__(
        self, node: float = 0.02, draft: float = 0.1, most: int = 6, seed: int = 0, score: float | None = None
    ) -> None:
        self.budget, self.request, self.most = budget_at(node, "any", most=most), request_of(), most
        self.random = np.random.default_rng(seed)
        self.node, self.draft_s, self.score = node, draft, score
        self.seconds, self.found = 0.0, 1.0

    def step(self, right: float) -> tuple[int, int]:
        """Simulate one step. Returns the numbers of drafted and accepted tokens. right: the probability that a draft
        token is accepted."""
        (limit,) = self.budget.share([self.request], [self.most], Expected.of_plain(1, 1))
        num_accepted, drafted_s = 0, 0.0
        if limit:
            self.budget.levels([limit], CPU)
            if self.random.random() >= self.found:
                limit = 0
            scores = None if self.score is None else torch.full((limit,), self.score)
            (limit,) = self.budget.keep(
                attrs.evolve(Draft.from_chains([[7] * limit]), scores=scores)
            ).num_nodes_per_request
            drafted_s = self.draft_s
            self.budget.end_drafting(drafted_s, 0.0)
            while num_accepted < limit and self.random.random() < right:
                num_accepted += 1
        last = 7 if num_accepted == limit and self.random.random() < right else 2
        self.request.token_ids = np.append(self.request.token_ids, [7] * num_accepted + [last])
        step_s = 1 + self.node * limit + drafted_s
        self.seconds += step_s
        self.budget.end_steps([step_s], 1, {"any": num_accepted})
        return limit, num_accepted

    def steps(self, number: int, right: float) -> np.ndarray:
        return np.array([self.step(right) for _ in range(number)])


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


@pytest.mark.parametrize("node", [0.1, 0.3])
def test_a_draft_is_judged_though_it_was_cut_away(node: float) -> None:
    """All draft tokens of a retry are cut, since they were wrong before. That they are right now shows in the text."""
    simulated = Simulated(node=node, score=0.6)
    assert not simulated.steps(300, 0.0)[-50:, 0].any()
    recovering = simulated.steps(1000, 1.0)
    assert (recovering[-20:, 0] == 6).all()


def test_past_drafts_keep_no_probabilities() -> None:
    """They are [rows, vocab]: the largest tensors of a draft."""
    draft = attrs.evolve(
        draft_of([([5, 6], [-1, 0])]), q=torch.ones(2, 9) / 9, q_rows=torch.tensor([0, 1], dtype=torch.int32)
    )
    budget = budget_at(0.01, "a")
    assert kept(budget, "a", draft).q is draft.q
    assert [past.draft.q for past in budget._past] == [None]


def test_a_proposer_that_drafts_again_is_not_idle() -> None:
    budget, requests = budget_at(0.01, "a"), [request_of("a")]
    budget.end_steps([1.0], 1, {})
    budget.retries._debt.add(100.0)
    budget.idle.begin(requests)
    assert budget.stays_idle(requests)
    budget.share(requests, [9], Expected.of_plain(1, 1))  # as when another proposer's retry was due
    assert not budget.stays_idle(requests)


def test_a_retry_is_not_due_where_no_request_may_draft() -> None:
    budget, requests = budget_at(0.01, "a"), [request_of("a")]
    budget.idle._off.add("a")
    budget.share(requests, [0], Expected.of_plain(1, 1))
    budget.idle.begin(requests)
    for _ in range(100):
        budget.end_steps([1.0], 1, {})
        assert budget.retries.is_due
        assert budget.stays_idle(requests)
        budget.pass_step()
    for seconds, changes in ((1.03, False), (1.2, True)):
        for _ in range(NUM_BETWEEN):
            assert budget.stays_idle(requests)
            budget._curve.add(1, seconds)
        assert budget.stays_idle(requests) != changes, "drafts may pay, or not"


def test_while_all_are_off_the_prefill_of_others_wakes_nobody() -> None:
    budget = budget_at(1.0, *"abc", most=2)
    a, b, c = (request_of(name) for name in "abc")
    budget.retries._debt.add(9.0)  # none is due
    assert budget.share([a, b], [2, 2], Expected.of_plain(2, 2)) == [0, 0]
    budget.idle.begin([a, b])
    assert budget.stays_idle([a, b])
    assert budget.stays_idle([a, b, c], is_prefill=True)
    assert not budget.stays_idle([a, b, c]), "a new request may repeat itself"
    assert not budget.stays_idle([b]), "in a smaller batch, drafts may pay"
    budget.finish(a)
    assert budget.stays_idle([b, c], is_prefill=True)
    assert a not in budget.idle._requests, "its listener may refer to the engine"
    budget.retries._debt.pay(1e9)
    assert not budget.stays_idle([a, b, c], is_prefill=True)


def test_a_choice_holds_while_only_another_proposer_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, requests, chosen = budget_at(0.01, "a"), [request_of("a")], []
    monkeypatch.setattr(budget, "_choose", lambda rows, limits, so_far: chosen.append(1) or [0])
    monkeypatch.setattr(Retries, "is_due", False)
    for _ in range(2 * budgets.NUM_HELD):
        assert budget.share(requests, [9], Expected.of_plain(1, 1)) == [0]
        budget.idle.begin(requests)
    assert len(chosen) == 2
    budget.pass_step()
    budget.share(requests, [9], Expected.of_plain(1, 1))
    assert len(chosen) == 3


def test_a_choice_does_not_hold_where_more_may_be_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a step in which a prompt took the room, and a single draft token did not pay."""
    budget, requests = budget_at(0.01, "a"), [request_of("a")]
    monkeypatch.setattr(budget, "_choose", lambda rows, limits, so_far: [limits[0] if limits[0] > 1 else 0])
    monkeypatch.setattr(Retries, "is_due", False)
    found = [budget.share(requests, [limit], Expected.of_plain(1, 1)) for limit in (1, 1, 5, 3, 5, 6)]
    assert found == [[0], [0], [5], [3], [5], [6]]


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
    assert budget.share(requests, [9] * len(requests), Expected.of_plain(len(requests), len(requests))) == expected
    budget.levels(expected, CPU)
    budget.keep(Draft.from_chains([[5]] * len(requests)))
    budget.end_drafting(drafted_s, late_s)
    budget.end_steps([step_s], len(requests), accepted)
    return budget.retries._debt._owed_s


def test_a_retry_pays_what_it_took_less_what_it_gained() -> None:
    def cost(step_s: float, num_accepted: int) -> float:
        accepted = {"a": num_accepted}
        return cost_of_retry(budget_at(0.01, "a"), [request_of("a")], [0], 0.5, 0.0, step_s, accepted)

    estimated = 4 * 0.01 + 0.5
    assert cost(1.2, 0) == pytest.approx(estimated), "longer than the step took more than a plain one, which takes 1"
    assert cost(1.9, 0) == pytest.approx(0.9)
    assert cost(99.0, 0) == pytest.approx(retries.OUTLIER * estimated)
    assert cost(3.0, 1) == pytest.approx(1.0)
    assert cost(1.9, 1) == 0


def test_a_retry_beside_other_requests_pays_for_its_part() -> None:
    budget, requests = budget_at(0.01, "a", "b"), [request_of("a"), request_of("b")]
    tokens_s = budget._curve.more_s(2, retries.NUM_TOKENS)
    assert cost_of_retry(budget, requests, [9, 0], 2.0, 0.5) == pytest.approx(tokens_s + 2.0 / 2 + 0.5)


def test_a_retry_is_not_free_because_others_gain() -> None:
    budget, requests = budget_at(0.01, "a", "b"), [request_of("a"), request_of("b")]
    alone = cost_of_retry(budget, requests, [9, 0], 2.0, 0.0)
    for accepted, is_paid in (({"a": 9}, False), ({"b": 9}, True)):
        budget = budget_at(0.01, "a", "b")
        assert cost_of_retry(budget, requests, [9, 0], 2.0, 0.0, accepted=accepted) == (0 if is_paid else alone)


def test_a_few_requests_are_tried_again_in_turn() -> None:
    budget, tried = budget_at(1.0, *"abcdef"), []
    requests = [request_of(name) for name in "abcdef"]
    budget._choose = lambda rows, limits, so_far: [0] * 6  # type: ignore[method-assign]
    for _ in range(3):
        tried.append(budget.share(requests, [9, 9, 2, 9, 9, 9], Expected.of_plain(6, 6)))
        assert budget.retries.number == retries.MOST_TOGETHER
    assert tried == [[4, 4, 2, 4, 0, 0], [4, 4, 0, 0, 4, 4], [0, 0, 2, 4, 4, 4]]


def test_one_slow_retry_does_not_stop_the_next_ones() -> None:
    budget, requests = budget_at(0.01, "a"), [request_of("a")]
    for step in range(clock.NUM_SKIPPED + NUM_NEEDED):
        budget._first.add(1, 0.1, step)
    tokens_s = budget._curve.more_s(1, retries.NUM_TOKENS)
    assert cost_of_retry(budget, requests, [0], 100.0, 0.0) == pytest.approx(tokens_s + retries.OUTLIER * 0.1)


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
        (limit,) = budget.share(requests, [6], Expected.of_plain(1, 1))
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
    assert budget.share([a, b], [2, 2], Expected.of_plain(2, 2)) == [0, 0]
    budget.idle.begin([a, b])
    budget.finish(b)
    assert budget.stays_idle([a, c])
    assert budget.is_off(c)
    assert not budget.stays_idle([a, b, c]), "a larger batch"
    assert budget.share([a, c], [2, 2], Expected.of_plain(2, 2)) == [0, 0]
    budget._past.append(Past([a], budget.survival.rows([a]), [9], [9], draft_of([([7], [-1])])))
    budget._learn()
    budget.idle.begin([a, c])
    budget.start(b, is_sampled=False)
    assert not budget.stays_idle([a, b]), "something was learned"


def test_a_method_that_is_off_beside_another_one_does_not_choose_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, requests, chosen = budget_at(0.01, "a"), [request_of("a")], []
    monkeypatch.setattr(budget, "_choose", lambda rows, limits, so_far: chosen.append(1) or [0])
    monkeypatch.setattr(Retries, "is_due", False)
    for _ in range(2 * budgets.NUM_HELD):
        assert budget.share(requests, [9], Expected(np.ones(1), 1, covered=np.full((1, 2), 0.5))) == [0]
    assert len(chosen) == 2


def test_what_did_not_pay_beside_others_may_pay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, requests, chosen = budget_at(0.01, "a"), [request_of("a")], []
    numbers = iter([0, 5, 0])
    monkeypatch.setattr(budget, "_choose", lambda rows, limits, so_far: chosen.append(1) or [next(numbers)])
    monkeypatch.setattr(Retries, "is_due", False)
    beside, alone = Expected(np.ones(1), 1, covered=np.full((1, 2), 0.5)), Expected.of_plain(1, 1)
    found = [budget.share(requests, [9], so_far) for so_far in (beside, beside, alone, alone, beside)]
    assert found == [[0], [0], [5], [5], [0]], "what pays alone may not pay beside others"
    assert len(chosen) == 3


def test_the_memory_of_shared_rates_is_in_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in batches: a large one would make it longer."""
    monkeypatch.setattr(rates, "SHARED_DECAY", 1 - 1 / 1000)
    forgotten = []
    for size in (1, 100):
        shared = rates.Rates(1, np.array([0.7]))
        for is_right in (True, False):
            for _ in range((3000 if is_right else 1500) // size):
                shared.add(np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64), np.full(size, is_right))
        forgotten.append(float(shared._shared()[0, 0]))
    assert forgotten[1] == pytest.approx(forgotten[0], abs=0.01)
    assert forgotten[1] < 0.3


def test_other_texts_change_the_estimates_soon() -> None:
    """Many draft tokens of one kind of text were right. Those of the next kind are wrong, for whichever request."""
    found = rates.Rates(8, np.array([0.7, 0.9]))
    bins = np.array([0, 1] * 4)
    for _ in range(4000):
        found.add(np.arange(8), bins, np.full(8, True))
    for _ in range(32):  # 256 draft tokens
        found.add(np.arange(8), bins, np.full(8, False))
    found.start(3, 0)  # a new request, of which nothing is known
    assert (found.estimates[3] < 0.6).all()
    for _ in range(64):
        found.add(np.arange(8), bins, np.full(8, False))
    found.start(3, 0)
    assert (found.estimates[3] < 0.2).all()


def test_a_draft_that_is_always_right_is_never_stopped() -> None:
    assert (Simulated(node=0.05, draft=0.3).steps(60, 1.0)[5:] == 6).all()


@pytest.mark.parametrize("right", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("draft", [0.02, 0.4])
def test_drafts_are_about_as_long_as_pays(right: float, draft: float) -> None:
    """Drafts yield at least 95% of the tokens per second of the best fixed length, and of plain decoding."""
    simulated = Simulated(node=0.05, draft=draft, most=10)
    simulated.steps(100, right)
    before = simulated.seconds
    reached = (simulated.steps(1500, right)[:, 1] + 1).sum() / (simulated.seconds - before)
    best = max(
        sum(right**i for i in range(length + 1)) / (1 + 0.05 * length + (draft if length else 0))
        for length in range(11)
    )
    assert reached > 0.95 * best


def test_a_new_request_starts_with_what_others_showed() -> None:
    survival, requests = Survival(2), [request_of("old"), request_of("new")]
    survival.start(requests[0], is_sampled=False)
    wrong = Draft.from_chains([[1, 1]])
    for _ in range(100):
        requests[0].token_ids = np.append(requests[0].token_ids, 2)
        survival.learn([Past(requests[:1], np.array([0]), [len(requests[0].token_ids) - 1], [9], wrong)])
    survival.start(requests[1], is_sampled=False)
    assert survival.of_levels(np.array([1]), 0, 1) < 0.1, "the other request's drafts were never right"
    survival.finish(requests[1])
    survival.start(requests[1], is_sampled=True)
    assert survival.of_levels(np.array([1]), 0, 1) > 0.5, "requests that sample have statistics of their own"


def test_a_request_forgets_when_it_ends() -> None:
    survival, request = Survival(1), request_of()
    survival.start(request, is_sampled=False)
    request.token_ids = np.zeros(30, dtype=np.int64)
    survival.learn([Past([request], np.array([0]), [5], [99], Draft.from_chains([[0] * 25]))])
    survival.update(np.array([0]))
    assert survival.of_levels(np.array([0]), 0, 1) > 0.9
    survival.finish(request)
    survival.start(request, is_sampled=True)
    assert survival.of_levels(np.array([0]), 0, 1) == pytest.approx(0.7)


def test_nothing_is_learned_of_a_request_that_emitted_nothing() -> None:
    survival, request = Survival(1), request_of()
    survival.start(request, is_sampled=False)
    survival.learn([Past([request], np.array([0]), [5], [99], Draft.from_chains([[1, 2]]))])
    assert not survival._nodes._tried.any()
