"""A draft tree that a level budget stops is the upper part of the whole tree."""

from __future__ import annotations

import attrs
from hypothesis import given, settings, strategies as st
from level_stops import StopsAt
from test_drafting import batch_of
from test_trees import CPU, SHAPES, VOCAB, dynamic_reference, dynamic_tree, grown, tokens_of

from specdec_core.config.token_tree import TokenTree
from specdec_core.contracts.draft import Draft
from specdec_core.drafting import grower_of
from specdec_core.engine.draft_check import check_draft


@given(
    shape=st.sampled_from(SHAPES),
    budgets_and_depths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_of_a_static_tree(shape: str, budgets_and_depths: list[tuple[int, int]]) -> None:
    budgets, depths = map(list, zip(*budgets_and_depths, strict=True))
    whole_batch = batch_of(budgets, [0.0] * len(budgets))

    def draft_of(levels: StopsAt | None) -> Draft:
        return grown(grower_of(attrs.evolve(whole_batch, levels=levels), TokenTree.parse(shape)), len(budgets))

    whole, stopped = draft_of(None), draft_of(StopsAt(depths))
    check_draft(stopped, budgets, VOCAB, CPU)
    for b, depth in enumerate(depths):
        assert tokens_of(stopped, b) == [path for path in tokens_of(whole, b) if len(path) <= depth]


@given(
    top_k=st.integers(1, 4),
    budgets_and_depths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_of_a_dynamic_tree(top_k: int, budgets_and_depths: list[tuple[int, int]]) -> None:
    budgets, depths = map(list, zip(*budgets_and_depths, strict=True))
    draft = grown(dynamic_tree(budgets, top_k, 3, levels=StopsAt(depths)), len(budgets))
    check_draft(draft, budgets, VOCAB, CPU)
    for b, (budget, depth) in enumerate(zip(budgets, depths, strict=True)):
        deepest = min(depth, max(budgets), 4)
        assert tokens_of(draft, b) == dynamic_reference(b, top_k, deepest - 1, budget)[0]
