"""A naive verifier, and random test batches. At each node the verifier draws the target's token and goes to the child
that has this token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from specdec_core.contracts.draft import DEAD, Draft, DraftTree
from specdec_core.contracts.verifier import Verdict

DrawToken = Callable[[torch.Tensor, int, int], int]
"""(row of logits, request, depth of that row's node) -> token."""


def is_bad(row: torch.Tensor) -> bool:
    values = row.tolist()
    return any(math.isnan(v) or v == math.inf for v in values) or all(v == -math.inf for v in values)


def walk(logits: torch.Tensor, tree: DraftTree, root_row: int, draw: Callable[[torch.Tensor, int], int]) -> list | None:
    """Verify one draft tree. Return a list of (row, token) for the root and each accepted node, in order.

    row: index of the node's row of logits. token: drawn from this row.
    Returns None if the accepted path reaches a row with NaN, with +inf, or with only -inf.

    root_row: index of the root's row.
    draw: function that draws a token from a row of logits, given the row and the node's depth.
    """
    node, path = -1, []
    while True:
        row = root_row + 1 + node
        if is_bad(logits[row]):
            return None
        token = draw(logits[row], len(path))
        path.append((row, token))
        children = [i for i, parent in enumerate(tree.parents) if parent == node and tree.token_ids[i] == token]
        if not children:
            return path
        node = children[0]


def assert_verdict(verdict: Verdict, logits: torch.Tensor, draft: Draft, draw: DrawToken) -> None:
    """Assert that a verdict equals the naive verifier's result, except in entries that the contract leaves
    undefined."""
    width = draft.max_depth + 1
    assert verdict.token_ids.shape == verdict.rows.shape == (draft.batch_size, width)
    assert verdict.num_accepted.shape == (draft.batch_size,)
    assert (verdict.token_ids.dtype, verdict.rows.dtype) == (torch.int64, torch.int32)
    assert verdict.num_accepted.dtype == torch.int32
    for b in range(draft.batch_size):
        root_row = draft.offsets[b] + b
        path = walk(logits, draft.tree(b), root_row, lambda row, depth, b=b: draw(row, b, depth))
        tokens, rows = verdict.token_ids[b].tolist(), verdict.rows[b].tolist()
        if path is None:
            assert tokens == [-1] * width, f"request {b} reaches a row that is not finite"
            assert all(root_row <= row <= draft.offsets[b + 1] + b for row in rows)
            continue
        padding = width - len(path)
        assert tokens == [token for _, token in path] + [-1] * padding, f"token_ids of request {b}"
        assert rows == [row for row, _ in path] + [path[-1][0]] * padding, f"rows of request {b}"
        assert int(verdict.num_accepted[b]) == len(path) - 1, f"num_accepted of request {b}"


@st.composite
def draft_trees(draw: st.DrawFn, vocab: int, max_nodes: int = 9) -> DraftTree:
    """Hypothesis strategy for draft trees: chains, branching trees and empty ones.

    There are few different tokens, so that siblings are often equal. Some nodes are dead (padding).
    """
    num_nodes = draw(st.integers(0, max_nodes))
    kind = draw(st.sampled_from(["chain", "chain with a dead tail", "tree", "tree with dead nodes"]))
    lowest = {"tree": -1, "tree with dead nodes": DEAD}.get(kind)
    parents = [i - 1 if lowest is None else draw(st.integers(lowest, i - 1)) for i in range(num_nodes)]
    if kind == "chain with a dead tail" and num_nodes:
        first = draw(st.integers(0, num_nodes - 1))
        parents[first:] = [DEAD, *(draw(st.sampled_from([DEAD, i - 1])) for i in range(first + 1, num_nodes))]
    return DraftTree([draw(st.integers(0, vocab - 1)) for _ in range(num_nodes)], parents)


def is_a_chain(tree: DraftTree) -> bool:
    """Whether the live (not padding) nodes come before all dead ones and form a chain."""
    length = next((i for i, parent in enumerate(tree.parents) if parent != i - 1), len(tree.parents))
    return all(parent == DEAD or parent >= length for parent in tree.parents[length:])


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Draft]:
    """Hypothesis strategy for target logits and a batch of drafts.

    The logits, float32 [num_rows, vocab], have no ties. Some entries are -inf, and some rows have NaN, +inf or only
    -inf.
    """
    import attrs

    vocab = draw(st.sampled_from([2, 3, 5]))
    trees = draw(st.lists(draft_trees(vocab), min_size=1, max_size=5))
    draft = Draft.from_trees(trees)
    is_chain = all(map(is_a_chain, trees)) and draw(st.booleans())
    draft = attrs.evolve(draft, max_depth=draft.max_depth + draw(st.sampled_from([0, 0, 0, 2])), is_chain=is_chain)
    num_rows = draft.num_nodes + draft.batch_size
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = torch.tensor(rng.normal(size=(num_rows, vocab)), dtype=torch.float32)
    masked = torch.tensor(rng.random((num_rows, vocab)) < draw(st.sampled_from([0.0, 0.3])))
    masked[torch.arange(num_rows), torch.tensor(rng.integers(vocab, size=num_rows))] = False
    logits[masked] = -math.inf
    for row in draw(st.lists(st.integers(0, num_rows - 1), max_size=2)):
        kind = draw(st.sampled_from(["one nan", "all nan", "one +inf", "all -inf"]))
        if kind.startswith("one"):
            logits[row, int(rng.integers(vocab))] = math.nan if kind == "one nan" else math.inf
        else:
            logits[row] = math.nan if kind == "all nan" else -math.inf
    return logits, draft


class SmallestHash:
    """A random source that puts the tokens in a random order and draws the first one whose weight is positive.

    The order depends on the request and the depth. The sizes of the weights do not matter, so their rounding changes no
    draw.
    """

    def __init__(self, num_requests: int, max_depth: int, vocab: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rank = torch.tensor(rng.random((num_requests, max_depth + 1, vocab)))

    def target_token(self, weights: torch.Tensor, requests: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        weights = torch.nan_to_num(weights, nan=0.0, posinf=0.0)
        assert bool((weights >= 0).all()), "weights are probabilities, not logits"
        return self.rank[requests.long(), depths.long()].masked_fill(weights <= 0, 2.0).argmin(-1)

    def draw(self, row: torch.Tensor, request: int, depth: int) -> int:
        return int(self.rank[request, depth].masked_fill(row == -math.inf, 2.0).argmin())


def draft_of(trees: Sequence[tuple[list[int], list[int]]]) -> Draft:
    return Draft.from_trees([DraftTree(*tree) for tree in trees])
