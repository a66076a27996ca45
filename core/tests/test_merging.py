"""merge_drafts compared with a naive merge, which collects the paths of all drafts in a dictionary."""

from __future__ import annotations

from math import prod
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specdec_core import DEAD, ConfigError, Draft, DraftTree
from specdec_core.drafting.merging import LEAST_SCORE, merge_drafts
from specdec_core.engine.draft_check import check_draft

VOCAB = 3
CPU = torch.device("cpu")

Path = tuple[int, ...]


@st.composite
def trees(draw: Any) -> DraftTree:
    """Hypothesis strategy for draft trees with few different tokens, so that paths repeat, and with dead (padding)
    nodes."""
    size = draw(st.integers(0, 7))
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    parents = [draw(st.sampled_from([-1, *range(i), *range(i), DEAD])) for i in range(size)]
    return DraftTree(tokens, parents)


@st.composite
def batches(draw: Any) -> tuple[list[Draft], list[int]]:
    num_requests = draw(st.integers(1, 3))
    drafts = []
    for _ in range(draw(st.integers(1, 3))):
        draft = Draft.from_trees(draw(st.lists(trees(), min_size=num_requests, max_size=num_requests)))
        some = st.sampled_from([0.0, 1e-30, 0.2, 0.3, 0.5, 0.5, 1.0])
        if draw(st.booleans()):
            scores = draw(st.lists(some, min_size=draft.num_nodes, max_size=draft.num_nodes))
            draft = attrs.evolve(draft, scores=torch.tensor(scores, dtype=torch.float32))
        drafts.append(draft)
    return drafts, draw(st.lists(st.integers(-1, 12), min_size=num_requests, max_size=num_requests))


def paths(draft: Draft, request: int) -> list[Path | None]:
    """Return the path of each node: the tokens from the root's child to the node, or None for dead (padding) nodes and
    their descendants."""
    found: list[Path | None] = []
    for token, parent in zip(*draft.tree(request), strict=True):
        above = () if parent == -1 else None if parent == DEAD else found[parent]
        found.append(None if above is None else (*above, token))
    return found


def scores(draft: Draft, request: int) -> list[float]:
    values = torch.ones(draft.num_nodes) if draft.scores is None else draft.scores
    return values[draft.offsets[request] : draft.offsets[request + 1]].tolist()


def naive(drafts: list[Draft], request: int) -> dict[Path, float]:
    """Merge one request's drafts. Return the score of each path that does not lead to a dead (padding) node.

    Paths come in descending order of the product of the scores along them. A path in several drafts gets its highest
    score.
    """
    score: dict[Path, float] = {}
    origin: dict[Path, int] = {}
    for number, draft in enumerate(drafts):
        for path, value in zip(paths(draft, request), scores(draft, request), strict=True):
            if path is not None:
                score[path] = max(value, score.get(path, value))
                origin.setdefault(path, number)

    def rank(path: Path) -> tuple[float, int, int]:
        joint = prod(max(score[path[:depth]], LEAST_SCORE) for depth in range(1, len(path) + 1))
        return -joint, origin[path], len(path)

    return {path: score[path] for path in sorted(score, key=rank)}


@settings(max_examples=300, deadline=None)
@given(batches())
def test_it_is_the_best_of_all_paths(batch: tuple[list[Draft], list[int]]) -> None:
    drafts, budgets = batch
    merged = merge_drafts(drafts, budgets)
    check_draft(merged, [max(budget, 1) for budget in budgets], VOCAB, CPU)
    for request, budget in enumerate(budgets):
        expected = list(naive(drafts, request).items())[: max(budget, 0)]
        assert list(zip(paths(merged, request), scores(merged, request), strict=True)) == expected
    kept = [path for request in range(len(budgets)) for path in paths(merged, request)]
    assert merged.max_depth == max(map(len, kept), default=0)
    parents = [merged.tree(request).parents for request in range(len(budgets))]
    assert merged.is_chain == all(each == list(range(-1, len(each) - 1)) for each in parents)
    if any(draft.num_nodes for draft in drafts):
        assert (merged.scores is None) == all(draft.scores is None for draft in drafts)
    assert (merged.q, merged.q_rows) == (None, None)


@settings(max_examples=100, deadline=None)
@given(batches())
def test_siblings_differ_and_fall(batch: tuple[list[Draft], list[int]]) -> None:
    drafts, budgets = batch
    merged = merge_drafts(drafts, budgets)
    for request in range(len(budgets)):
        siblings: dict[int, list[tuple[float, int]]] = {}
        (tokens, parents), values = merged.tree(request), scores(merged, request)
        for token, parent, value in zip(tokens, parents, values, strict=True):
            siblings.setdefault(parent, []).append((value, token))
        for group in siblings.values():
            assert [value for value, _ in group] == sorted((value for value, _ in group), reverse=True)
            assert len({token for _, token in group}) == len(group)


@settings(max_examples=100, deadline=None)
@given(batches())
def test_with_room_for_all_nothing_is_lost_and_less_room_takes_the_first(batch: tuple[list[Draft], list[int]]) -> None:
    drafts, budgets = batch
    whole, part = merge_drafts(drafts, [99] * len(budgets)), merge_drafts(drafts, budgets)
    for request, budget in enumerate(budgets):
        alive = {path for draft in drafts for path in paths(draft, request)} - {None}
        assert set(paths(whole, request)) == alive
        assert part.tree(request) == DraftTree(*(each[: max(budget, 0)] for each in whole.tree(request)))


def scored(tree: DraftTree, *values: float) -> Draft:
    return attrs.evolve(Draft.from_trees([tree]), scores=torch.tensor(values))


def test_an_example() -> None:
    left = scored(DraftTree([5, 6, 7], [-1, 0, -1]), 0.5, 0.5, 0.4)
    right = scored(DraftTree([7, 5, 8], [-1, -1, 1]), 0.9, 0.3, 0.75)
    merged = merge_drafts([left, right], [4])
    assert merged.tree(0) == DraftTree([7, 5, 8, 6], [-1, -1, 1, 1])  # .9, .5, .5 * .75, .5 * .5
    torch.testing.assert_close(merged.scores, torch.tensor([0.9, 0.5, 0.75, 0.5]))
    assert (merged.max_depth, merged.is_chain) == (2, False)


def test_ties_go_to_the_earlier_draft_and_then_to_the_shallower_node() -> None:
    deep_first = Draft.from_trees([DraftTree([1, 2, 3], [-1, 0, -1])])
    other = Draft.from_chains([[4, 5]])
    assert merge_drafts([deep_first, other], [4]).tree(0) == DraftTree([1, 3, 2, 4], [-1, -1, 0, -1])
    assert merge_drafts([other, deep_first], [3]).tree(0) == DraftTree([4, 5, 1], [-1, 0, -1])


def test_a_draft_without_scores_goes_first() -> None:
    guess = scored(DraftTree([1, 2], [-1, 0]), 0.9, 1.0)
    merged = merge_drafts([guess, Draft.from_chains([[3, 4]])], [3])
    assert merged.tree(0) == DraftTree([3, 4, 1], [-1, 0, -1])
    assert merged.scores is not None
    assert merged.scores.tolist() == pytest.approx([1.0, 1.0, 0.9])


def test_nodes_below_a_score_of_zero_still_differ() -> None:
    merged = merge_drafts([scored(DraftTree([1, 2, 3], [-1, 0, 0]), 0.0, 0.1, 0.9)], [2])
    assert merged.tree(0) == DraftTree([1, 3], [-1, 0])


@pytest.mark.parametrize("value", [2.0, -1.0, torch.nan])
def test_scores_that_are_none_leave_a_tree_and_stay_to_be_refused(value: float) -> None:
    merged = merge_drafts([scored(DraftTree([1, 2, 1], [-1, 0, 1]), 0.5, value, value)], [2])
    assert merged.tree(0) == DraftTree([1, 2], [-1, 0])
    with pytest.raises(ValueError, match="scores are"):
        check_draft(merged, [2], VOCAB, CPU)


@pytest.mark.parametrize("num_requests", [0, 2])
def test_nothing_to_merge(num_requests: int) -> None:
    empty = Draft.from_chains([[]] * num_requests)
    merged = merge_drafts([empty, empty], [4] * num_requests)
    assert (merged.offsets, merged.max_depth, merged.is_chain) == (empty.offsets, 0, True)
    dead = Draft.from_trees([DraftTree([1, 2], [DEAD, 0])])
    assert merge_drafts([dead], [4]).offsets == (0, 0)


def test_chains_of_any_length_share_what_they_can() -> None:
    long = list(range(40))
    merged = merge_drafts([Draft.from_chains([long, long[:9]]), Draft.from_chains([[*long[:30], 99], long])], [80, 80])
    assert merged.tree(0) == DraftTree([*long, 99], [-1, *range(39), 29])
    assert merged.tree(1) == DraftTree(long, [-1, *range(39)])
    assert (merged.max_depth, merged.is_chain) == (40, False)


def test_large_token_ids_are_told_apart() -> None:
    tokens = [0, 1, 2**31 - 1, 2**31 - 2, 0]
    assert set(merge_drafts([Draft.from_trees([DraftTree(tokens, [-1] * 5)])], [9]).tree(0).token_ids) == set(tokens)


def test_sampled_nodes_are_refused() -> None:
    chain = Draft.from_chains([[1, 2]])
    q = torch.full((1, VOCAB), 1 / VOCAB)
    drawn = attrs.evolve(chain, q=q, q_rows=torch.tensor([-1, 0], dtype=torch.int32))
    with pytest.raises(ConfigError, match=r"drafts\[1\] has sampled nodes.*rule 3"):
        merge_drafts([chain, drawn], [4])
    chosen = attrs.evolve(chain, q=q, q_rows=torch.tensor([-1, -1], dtype=torch.int32))
    merged = merge_drafts([chosen, chain], [4])
    assert (merged.tree(0), merged.q, merged.q_rows) == (chain.tree(0), None, None)


def test_drafts_that_do_not_belong_together_are_refused() -> None:
    two, one = Draft.from_chains([[1], [2]]), Draft.from_chains([[1]])
    with pytest.raises(ConfigError, match="drafts for 2, 1 requests do not merge under 2 budgets"):
        merge_drafts([two, one], [1, 1])
    with pytest.raises(ConfigError, match="drafts for 2 requests do not merge under 1 budgets"):
        merge_drafts([two], [1])
    with pytest.raises(ConfigError, match="drafts on cpu, meta do not merge"):
        merge_drafts([one, attrs.evolve(one, token_ids=one.token_ids.to("meta"))], [1])
    with pytest.raises(ConfigError, match="no drafts"):
        merge_drafts([], [])
