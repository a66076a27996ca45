"""The budget of a step: which draft tokens are cut, and what is learned of drafts and of costs."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from naive_verifier import draft_of
from simulated_budget import CPU, Simulated, budget_at, request_of

from specdec_core.budget import rates
from specdec_core.budget.budget import Budget
from specdec_core.budget.choice import Expected
from specdec_core.budget.nodes import Nodes, without
from specdec_core.budget.survival import ANY, LEVELS, Past, Survival
from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.engine.draft_check import check_draft


def kept(budget: Budget, names: str, draft: Draft) -> Draft:
    requests = [request_of(name) for name in names]
    budget._asks_levels = True
    assert all(budget.share(requests, [9] * len(names), Expected.of_plain(len(names))))
    budget.levels([9] * len(names), CPU)
    return budget.keep(draft)


@pytest.mark.parametrize("is_host_made", [True, False])
def test_longer_drafts_of_a_gpu_are_not_asked_for_to_be_cut(is_host_made: bool) -> None:
    """Where nodes have scores, the host drafts as much as it may, and cuts what does not pay. On a GPU a level costs a
    forward pass of the draft."""
    budget = budget_at(0.4, "a")
    draft = attrs.evolve(draft_of([([5, 6, 7], [-1, 0, 1])]), scores=torch.tensor([0.9, 0.9, 0.9]))
    request = request_of("a")
    for _ in range(2):
        (number,) = budget.share([request], [9], Expected.of_plain(1))
        budget.levels([9], torch.device("cpu" if is_host_made else "meta"))
        budget.keep(draft, is_host_made=is_host_made)
        budget._held = None
    assert (number == 9) == is_host_made


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
    assert survival._rates._tried[:, :LEVELS].sum() == 2
    sampled = attrs.evolve(draft, q=torch.ones(1, 9) / 9, q_rows=torch.tensor([0, 0, -1], dtype=torch.int32))
    assert Nodes.of(sampled).is_first.tolist() == [False, True, False]


def test_a_draft_may_be_one_dead_node() -> None:
    draft = attrs.evolve(draft_of([([7], [DEAD])]), max_depth=3)
    assert Nodes.of(draft).depths.tolist() == [0]


def test_without_keeps_the_rest_of_the_tree() -> None:
    draft = draft_of([([5, 6, 7], [-1, 0, 1]), ([8, 9], [-1, -1])])
    cut = without(draft, Nodes.of(draft), np.array([True, True, False, False, True]))
    assert [cut.tree(b) for b in range(2)] == [([5, 6], [-1, 0]), ([9], [-1])]


def test_past_drafts_keep_no_probabilities() -> None:
    """They are [rows, vocab]: the largest tensors of a draft."""
    draft = attrs.evolve(
        draft_of([([5, 6], [-1, 0])]), q=torch.ones(2, 9) / 9, q_rows=torch.tensor([0, 1], dtype=torch.int32)
    )
    budget = budget_at(0.01, "a")
    assert kept(budget, "a", draft).q is draft.q
    assert [past.draft.q for past in budget._unlearned.past] == [None]


def test_the_memory_of_shared_rates_is_in_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in batches: a large one would make it longer."""
    monkeypatch.setattr(rates, "LOG_DECAY", np.log(1 - 1 / 1000))
    forgotten = []
    for size in (1, 100):
        shared = rates.Rates(1, np.array([0.7]))
        for is_right in (True, False):
            for _ in range((3000 if is_right else 1500) // size):
                shared.add(np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64), np.full(size, is_right))
        shared._log_odds_of_groups()
        forgotten.append(float(shared._shared[0, 0]))
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
    found.update(np.array([3]))
    assert (found.estimates[3] < 0.6).all()
    for _ in range(64):
        found.add(np.arange(8), bins, np.full(8, False))
    found.start(3, 0)
    found.update(np.array([3]))
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


def test_a_load_of_the_machine_changes_decisions_and_one_slow_step_does_not() -> None:
    """Under the load, more tokens in a forward pass cost more."""
    simulated = Simulated(node=0.02, is_measured=True)

    def share_of_drafts(number: int) -> float:
        return float((simulated.steps(number, 0.8)[:, 0] > 0).mean())

    share_of_drafts(300)
    simulated.node = 50.0
    share_of_drafts(1)
    simulated.node = 0.02
    assert share_of_drafts(200) > 0.8, "after one slow step"
    simulated.node = 3.0
    share_of_drafts(200)
    assert share_of_drafts(200) < 0.1


def test_a_load_that_slows_down_everything_changes_no_decision() -> None:
    for load in (0.5, 2.0):
        simulated = Simulated(node=0.02, draft=1.0, is_measured=True)
        simulated.steps(300, 0.9)
        simulated.load = load
        assert (simulated.steps(300, 0.9)[:, 0] > 0).mean() > 0.8
        simulated.steps(600, 0.0)  # it is off, and only plain steps are measured
        assert simulated.budget._first.seconds(1) == pytest.approx(load, rel=0.2)
        simulated.budget.retries._debt.add(1e9)  # none is measured before the load is
        simulated.load = 1.0
        simulated.steps(200, 0.0)
        assert simulated.budget._first.seconds(1) == pytest.approx(1.0, rel=0.2)


def test_a_new_request_starts_with_what_others_showed() -> None:
    survival, requests = Survival(2), [request_of("old"), request_of("new")]
    survival.start(requests[0], is_sampled=False)
    wrong = Draft.from_chains([[1, 1]])
    for _ in range(100):
        requests[0].token_ids = np.append(requests[0].token_ids, 2)
        survival.learn([Past(requests[:1], np.array([0]), [len(requests[0].token_ids) - 1], [9], wrong)])
    survival.start(requests[1], is_sampled=False)
    survival.update(np.array([1]))
    assert survival.of_levels(np.array([1]), 0, 1) < 0.1, "the other request's drafts were never right"
    survival.finish(requests[1])
    survival.start(requests[1], is_sampled=True)
    survival.update(np.array([1]))
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
    survival.update(np.array([0]))
    assert survival.of_levels(np.array([0]), 0, 1) == pytest.approx(0.7)


def test_nothing_is_learned_of_a_request_that_emitted_nothing() -> None:
    survival, request = Survival(1), request_of()
    survival.start(request, is_sampled=False)
    survival.learn([Past([request], np.array([0]), [5], [99], Draft.from_chains([[1, 2]]))])
    assert not survival._rates._tried[:, :ANY].any()


@pytest.mark.parametrize("node", [0.1, 0.3])
def test_a_draft_is_judged_though_it_was_cut_away(node: float) -> None:
    """All draft tokens of a retry are cut, since they were wrong before. That they are right now shows in the text."""
    simulated = Simulated(node=node, score=0.6)
    assert not simulated.steps(300, 0.0)[-50:, 0].any()
    recovering = simulated.steps(1000, 1.0)
    assert (recovering[-20:, 0] == 6).all()
