"""Combining drafts of several proposers: the resulting trees, and that the output keeps the target's distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve, frozen

from specdec_core.contracts.draft import Draft, DraftTree
from specdec_core.contracts.verifier import RandomSource
from specdec_core.drafting import combining
from specdec_core.drafting.combining import combine_drafts
from specdec_core.verifiers.rejection import RejectionVerifier
from specdec_core.verifiers.traversal import TraversalVerifier
from specdec_testing.drawn_trees import SAMPLED as S, Model, Shape, draw, emit, random_model

VERIFIERS = {"rejection": RejectionVerifier, "traversal": TraversalVerifier}
SHAPES = {
    "a chain": Shape((-1, 0), (S, S), is_chain=True),
    "siblings": Shape((-1, -1, 0), (S, S, S)),
    "siblings, no two alike": Shape((-1, -1, 0), (S, S, S), with_replacement=False),
}


@frozen
class Deep(Shape):
    """A shape whose depth is always 3, as combined trees have at most 3 levels. So all outputs are equally long."""

    @property
    def depth(self) -> int:
        return 3


def deep(shape: Shape) -> Deep:
    return Deep(shape.parents, shape.tokens, shape.with_replacement, shape.is_chain)


def combined(most: int, *trees: DraftTree) -> Any:
    """Return a function that samples a draft and combines it with the fixed `trees`. most: the largest number of nodes
    of the combined draft."""

    def step(shape: Shape, q: Model, random: RandomSource) -> Draft:
        chosen = [Draft.from_trees([tree]) for tree in trees]
        return combine_drafts([chosen[0], draw(shape, q, random), *chosen[1:]], [most])

    return step


TREES = (DraftTree([0, 1, 0], [-1, 0, 1]), DraftTree([1, 1, 0], [-1, 0, -1]))


def error(rule: Any, shape: Shape, most: int, num_seeds: int = 2, vocab: int = 2) -> float:
    errors = []
    for seed in range(num_seeds):
        target = random_model(vocab, 4, seed)
        q = random_model(vocab, 4, seed + 1000, impossible=0.15 if shape.with_replacement else 0)
        errors.append(emit(rule, target, q, deep(shape), draw=combined(most, *TREES)).error)
    return max(errors)


@pytest.mark.parametrize("rule", VERIFIERS.values(), ids=VERIFIERS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("most", [3, 4, 6])
def test_lossless(rule: Any, shape: Shape, most: int) -> None:
    assert error(rule(), shape, most) < 1e-12


def test_sampled_nodes_that_go_for_others_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deliberate bug biases the output: the last sampled node is dropped if its token is 1."""

    def hang_on(self: Any, other: DraftTree, most: int) -> None:
        if self.token_ids[-1] == 1:
            self.token_ids.pop()
            self.parents.pop()
            self.num_whole -= 1

    monkeypatch.setattr(combining._Tree, "hang_on", hang_on)
    united = combining._united
    monkeypatch.setattr(combining, "_united", lambda whole, trees: evolve(united(whole, trees), is_chain=False))
    assert error(TraversalVerifier(), SHAPES["siblings"], 6) > 1e-3


def test_nodes_that_are_called_sampled_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    united = combining._united

    def wrong(whole: Draft, trees: Any) -> Draft:
        draft = united(whole, trees)
        return evolve(draft, q_rows=draft.q_rows.clamp(min=0))

    monkeypatch.setattr(combining, "_united", wrong)
    assert error(TraversalVerifier(), SHAPES["siblings"], 6) > 1e-3


def sampled(*trees: DraftTree) -> Draft:
    draft = Draft.from_trees(list(trees))
    rows = torch.zeros(draft.num_nodes, dtype=torch.int32)
    return evolve(draft, q=torch.full((1, 10), 0.1), q_rows=rows)


def test_what_hangs_on_where() -> None:
    whole = sampled(DraftTree([5, 6], [-1, -1]), DraftTree([7], [-1]), DraftTree([], []))
    other = Draft.from_trees([DraftTree([5, 8, 9], [-1, 0, 1]), DraftTree([3], [-1]), DraftTree([1, 2], [-1, 0])])
    found = combine_drafts([whole, other], [4, 1, 2])
    assert [found.tree(b) for b in range(3)] == [
        DraftTree([5, 6, 8, 9], [-1, -1, 0, 2]),
        DraftTree([7], [-1]),
        DraftTree([1, 2], [-1, 0]),
    ]
    assert found.q_rows is not None
    assert found.q_rows.tolist() == [0, 0, -1, -1, 0, -1, -1]
    assert (found.max_depth, found.offsets, found.is_chain) == (3, (0, 4, 5, 7), False)


def test_nothing_hangs_below_a_dead_node() -> None:
    whole = sampled(DraftTree([5, 6], [-2, 0]))
    found = combine_drafts([whole, Draft.from_chains([[5, 6, 7]])], [5])
    assert found.tree(0) == DraftTree([5, 6, 5, 6, 7], [-2, 0, -1, 2, 3])
    assert found.max_depth == 3


def test_a_second_draft_that_was_sampled_counts_as_chosen() -> None:
    found = combine_drafts([sampled(DraftTree([5], [-1])), sampled(DraftTree([6], [-1]))], [2])
    assert found.q_rows is not None
    assert (found.tree(0), found.q_rows.tolist()) == (DraftTree([5, 6], [-1, -1]), [0, -1])


def test_without_sampled_nodes_the_best_are_merged() -> None:
    found = combine_drafts([Draft.from_chains([[5, 6]]), Draft.from_chains([[5, 7]])], [2])
    assert found.tree(0) == DraftTree([5, 6], [-1, 0])
