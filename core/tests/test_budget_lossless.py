"""Sampled drafts under a level budget are lossless, in a batch of two requests that share the budget: the whole step is
enumerated."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from test_drafting import batch_of

from specdec_core.budget.budget import Budget
from specdec_core.budget.choice import Expected
from specdec_core.budget.cost_curve import CostCurve
from specdec_core.budget.nodes import Nodes, without
from specdec_core.budget.survival import EDGES, NUM_SCORES
from specdec_core.config.token_tree import TokenTree
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource
from specdec_core.drafting import grow, grower_of
from specdec_core.verifiers.block import BlockVerifier
from specdec_core.verifiers.rejection import RejectionVerifier
from specdec_core.verifiers.traversal import TraversalVerifier
from specdec_testing.drawn_trees import History, random_model, sequence_probability
from specdec_testing.enumerating import enumerate_outcomes

VOCAB = 2
LEVEL_S = 0.02  # seconds of another level; a forward pass of the target takes about 1
CHAIN = TokenTree.chain(2)
TREE = TokenTree.parse("[(0,), (0, 0), (0, 1)]")
CASES = [(RejectionVerifier, CHAIN), (BlockVerifier, CHAIN), (TraversalVerifier, CHAIN), (TraversalVerifier, TREE)]
TARGETS = [random_model(VOCAB, 3, 1, 0), random_model(VOCAB, 3, 2, 0)]
DRAFTS = [random_model(VOCAB, 2, 10, 0), random_model(VOCAB, 2, 11, 0)]


def request_of(name: str) -> Any:
    return SimpleNamespace(id=name, token_ids=np.zeros(5, dtype=np.int64))


class Step:
    """One step of two requests: a budget that has learned from earlier drafts, a draft, and its verification.

    keeps: changes the draft after it is drawn; the engine calls `Budget.keep`.
    """

    def __init__(self, rule: Any, tree: TokenTree, keeps: Any = Budget.keep) -> None:
        self.rule, self.tree, self.keeps = rule, tree, keeps
        self.sizes: Counter[tuple[int, ...]] = Counter()  # of the drafts

    def budget(self) -> Budget:
        """A budget whose statistics have likely tokens that were accepted, and unlikely ones that were not."""
        curve = CostCurve({1: 1.0, 2: 1.04, 9: 1.32}, 16)
        budget = Budget(curve, 2, len(self.tree.paths), in_place=False)
        for name in "ab":
            budget.start(request_of(name), is_sampled=True)
        probs = np.array([0.05, 0.15, 0.3, 0.4, 0.6, 0.7, 0.85, 0.95]).repeat(60)
        bins = EDGES.searchsorted(probs) + NUM_SCORES
        budget.survival._rates.add(np.zeros(len(probs), dtype=np.int64), bins, probs > 0.5)
        for _ in range(9):
            budget._first.add(2, 0.0, 0)
            budget._level.add(2, LEVEL_S, 0)
        budget._asks_levels = True
        return budget

    def draft(self, random: RandomSource) -> Draft:
        budget, budgets = self.budget(), [len(self.tree.paths)] * 2
        batch = batch_of(budgets, [1.0, 1.0], random)
        batch = attrs.evolve(batch, requests=[request_of("a"), request_of("b")])
        budget.share(batch.requests, budgets, Expected.of_plain(2))
        batch = attrs.evolve(batch, levels=budget.levels(budgets, torch.device("cpu")))
        grower = grower_of(batch, self.tree, "probabilistic")
        entries: list[tuple[int, History]] = [(0, ()), (1, ())]

        def logits() -> torch.Tensor:
            return torch.tensor(np.log([DRAFTS[b][path] for b, path in entries]))

        def forward(level: Any) -> torch.Tensor:
            pairs = zip(level.rows.tolist(), level.token_ids.tolist(), strict=True)
            entries[:] = [(entries[row][0], (*entries[row][1], token)) for row, token in pairs]
            return logits()

        return self.keeps(budget, grow(grower, logits(), forward))

    def __call__(self, random: RandomSource) -> tuple[History, ...]:
        draft = self.draft(random)
        self.sizes[tuple(draft.num_nodes_per_request)] += 1
        rows: list[np.ndarray] = []
        for b, target in enumerate(TARGETS):
            paths: list[History] = [()]
            for token, parent in zip(*draft.tree(b), strict=True):
                paths.append((*paths[parent + 1], token))
            rows += [target[path] for path in paths]
        verdict = self.rule().verify(torch.tensor(np.log(rows)), draft, random)
        ends = (verdict.num_accepted + 1).tolist()
        return tuple(tuple(ids[:end].tolist()) for ids, end in zip(verdict.token_ids, ends, strict=True))

    def error(self) -> float:
        """The largest difference between the probability of a pair of output sequences and what the targets give
        it."""
        emitted: Counter[tuple[History, ...]] = Counter()
        for probability, pair in enumerate_outcomes(self):
            emitted[pair] += probability  # type: ignore[assignment]
        assert abs(sum(emitted.values()) - 1) < 1e-12
        sequences, error = list(product(range(VOCAB), repeat=3)), 0.0
        for pair in product(sequences, sequences):
            expected = np.prod([sequence_probability(t, s, 0) for t, s in zip(TARGETS, pair, strict=True)])
            actual = 0.0
            for heads, probability in emitted.items():
                if all(s[: len(head)] == head for s, head in zip(pair, heads, strict=True)):
                    rest = zip(TARGETS, pair, heads, strict=True)
                    actual += probability * np.prod([sequence_probability(t, s, len(head)) for t, s, head in rest])
            error = max(error, abs(actual - expected))
        return error


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize(("rule", "tree"), CASES)
def test_sampled_drafts_that_stop_by_their_tokens_are_lossless(rule: Any, tree: TokenTree) -> None:
    step = Step(rule, tree)
    assert step.error() < 1e-12
    assert len(step.sizes) >= 3, f"drafts are too much alike, this shows nothing: {step.sizes}"


def cut_by_their_own_tokens(budget: Budget, draft: Draft) -> Draft:
    """A bug: sampled draft tokens are dropped if their probabilities are low."""
    assert draft.scores is not None
    nodes = Nodes.of(draft)
    return without(draft, nodes, nodes.down_the_tree(nodes.scores > 0.4))


def cut_together(budget: Budget, draft: Draft) -> Draft:
    """A bug: the best draft tokens of both requests are kept, by what was drawn."""
    of = Nodes.of

    def all_chosen(draft: Draft) -> Nodes:
        return attrs.evolve(nodes := of(draft), is_first=np.zeros_like(nodes.is_first))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Nodes, "of", all_chosen)
        budget._curve.seconds = lambda num_requests: np.linspace(0.7, 6, 17)  # type: ignore[method-assign]
        return budget.keep(draft)


def last_level_dropped(budget: Budget, draft: Draft) -> Draft:
    """A bug: if a level is not worth drafting below, the level itself is dropped, too."""
    nodes = Nodes.of(draft)
    deepest = np.zeros(2, dtype=np.int64)
    np.maximum.at(deepest, nodes.requests, nodes.depths)
    is_stopped = deepest < nodes.depths.max() if len(nodes.depths) else deepest > 0
    return without(draft, nodes, ~(is_stopped[nodes.requests] & (nodes.depths == deepest[nodes.requests])))


@pytest.mark.parametrize("keeps", [cut_by_their_own_tokens, cut_together, last_level_dropped])
@pytest.mark.parametrize(("rule", "tree"), CASES)
def test_bugs_are_noticed(rule: Any, tree: TokenTree, keeps: Any) -> None:
    assert Step(rule, tree, keeps).error() > 1e-3
