"""Several chosen drafts for the same requests as one: for proposers that guess in more than one way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen

from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.errors import ConfigError

LEAST_SCORE = torch.finfo(torch.float32).tiny
"""What a score of 0 counts as in a product, so that the nodes below such a one still differ."""


def merge_drafts(drafts: Sequence[Draft], max_draft_tokens: Sequence[int]) -> Draft:
    """One tree for each request, of the best nodes of several drafts over the same batch.

    Nodes that spell the same tokens from the root become one, with the larger of their scores; dead nodes, and all
    below one, are left out. Of the others, the max_draft_tokens[i] best ones of request i are kept, best first: those
    that are most likely to be reached and accepted, which is the product of `scores` down to them. Ties go to the
    earlier draft, then to the shallower node. So siblings stand in the order of falling scores. A draft without scores
    counts as certain, 1 everywhere: its nodes go before all that is less. The result has scores if any draft has.

    Raises ConfigError if a node was sampled, since rule 3 forbids to drop it (docs/losslessness.md); and if drafts and
    budgets are not for one batch, or the drafts not on one device.
    """
    _check(drafts, max_draft_tokens)
    cells = _Cells.of(drafts)
    if cells.width == 1:
        return Draft.from_chains([[]] * len(max_draft_tokens), cells.index.device)
    first, joint = _united(cells)

    # Whatever the budget, a kept node's parent is kept, because it comes before it in this order: its joint score is
    # not less (a float times a number up to 1 never rounds to more); where that is equal, every draft that has the
    # node has its parent, so the parent's draft is no later one; and where that is the same, the parent is higher up.
    shape, column = (-1, cells.width), torch.arange(cells.width, device=first.device)
    is_node = ((cells.depth > 0) & (first == cells.index)).view(shape)
    order = (cells.draft * cells.width + cells.depth).view(shape).argsort(dim=1, stable=True)
    joint = joint.view(shape).where(is_node, -1).gather(1, order)
    order = order.gather(1, joint.argsort(dim=1, descending=True, stable=True))
    counts = is_node.sum(dim=1).minimum(torch.tensor(max_draft_tokens, device=first.device)).clamp(min=0)

    is_kept = column < counts.unsqueeze(1)
    kept = cells.index.view(shape).gather(1, order)[is_kept]
    place = torch.empty_like(order).scatter(1, order, column.expand_as(order))
    place[:, 0] = -1  # the roots
    depths = cells.depth.view(shape).gather(1, order).where(is_kept, 0).amax(dim=1)
    num_nodes, max_depths = torch.stack([counts, depths]).tolist()
    return Draft(
        token_ids=cells.token.gather(0, kept),
        parents=place.flatten().gather(0, first.gather(0, cells.parent.gather(0, kept))).to(torch.int32),
        offsets=(0, *np.cumsum(num_nodes).tolist()),
        max_depth=max(max_depths),
        scores=cells.score.gather(0, kept) if any(draft.scores is not None for draft in drafts) else None,
        is_chain=num_nodes == max_depths,
    )


@frozen(eq=False)
class _Cells:
    """The nodes of all drafts as a table, [batch, width] flattened: in each row the root of a request, then its nodes,
    draft by draft. What is left of a row is empty: like a dead node, it is its own parent."""

    width: int
    index: torch.Tensor  # int64 [num_cells]   each cell's own number
    token: torch.Tensor  # int64 [num_cells]
    parent: torch.Tensor  # int64 [num_cells]   number of a cell
    score: torch.Tensor  # float32 [num_cells]
    draft: torch.Tensor  # int64 [num_cells]
    depth: torch.Tensor  # int64 [num_cells]   0: a root, no node, or one that is dead or below such a one

    @classmethod
    def of(cls, drafts: Sequence[Draft]) -> _Cells:
        device = drafts[0].token_ids.device
        counts = np.array([draft.num_nodes_per_request for draft in drafts], dtype=np.int64)
        width = 1 + int(counts.sum(axis=0).max(initial=0))
        roots = np.broadcast_to(np.arange(counts.shape[1]) * width, counts.shape)
        starts = roots + 1 + counts.cumsum(axis=0) - counts
        before = counts.cumsum().reshape(counts.shape) - counts  # nodes of earlier trees: those of a draft lie together
        numbers = np.broadcast_to(np.arange(len(drafts))[:, None], counts.shape)
        trees = np.stack([starts, roots, starts - before, numbers]).reshape(4, -1)
        start, root, shift, number = torch.from_numpy(trees.repeat(counts.ravel(), axis=1)).to(device)

        node = torch.arange(len(start), device=device) + shift
        parents = torch.cat([draft.parents for draft in drafts]).to(torch.int64)
        above = torch.where(parents >= 0, start + parents, torch.where(parents == DEAD, node, root))
        scores = [
            torch.ones(draft.num_nodes, device=device) if draft.scores is None else draft.scores for draft in drafts
        ]
        index = torch.arange(counts.shape[1] * width, device=device)
        parent = index.scatter(0, node, above)
        up, depth = parent, (parent != index).to(torch.int64)
        for _ in range(width.bit_length()):  # each time twice as far up
            up, depth = up.gather(0, up), depth + depth.gather(0, up)
        none = torch.zeros_like(index)
        return cls(
            width=width,
            index=index,
            token=none.scatter(0, node, torch.cat([draft.token_ids for draft in drafts])),
            parent=parent,
            score=none.to(torch.float32).scatter(0, node, torch.cat(scores)),
            draft=none.scatter(0, node, number),
            depth=depth.where(up % width == 0, 0),
        )


def _united(cells: _Cells) -> tuple[torch.Tensor, torch.Tensor]:
    """For each cell, the first one that spells the same tokens, int64 [num_cells], of which `cells.score` becomes the
    largest score among them; and the joint score at each of those, float64 [num_cells]."""
    first = cells.index.clone()
    joint = torch.ones(len(first), dtype=torch.float64, device=first.device)
    # A score that is no probability is for the engine to refuse; here it must not put a node before its parent.
    chance = cells.score.nan_to_num(0).clamp(LEAST_SCORE, 1).to(torch.float64)
    by_depth, sizes = cells.depth.argsort(stable=True), cells.depth.bincount().tolist()
    sorted_by_depth = (by_depth, *(each.gather(0, by_depth) for each in (cells.parent, cells.token, chance)))
    levels = zip(*(torch.split(each, sizes) for each in sorted_by_depth), strict=True)
    next(levels)  # what has no depth
    for level, parent, token, own in levels:
        above = first.gather(0, parent)
        alike, which = torch.unique(above << 32 | token, return_inverse=True)
        heads = torch.full_like(alike, len(first)).scatter_reduce_(0, which, level, "amin")
        first.scatter_(0, level, heads.gather(0, which))
        best = torch.zeros_like(heads, dtype=joint.dtype)
        joint.scatter_(0, heads, best.scatter_reduce_(0, which, joint.gather(0, above) * own, "amax"))
    cells.score.scatter_reduce_(0, first, cells.score.clone(), "amax")
    return first, joint


def _check(drafts: Sequence[Draft], max_draft_tokens: Sequence[int]) -> None:
    if not drafts:
        raise ConfigError("there are no drafts to merge: give one or more")
    sizes, devices = [draft.batch_size for draft in drafts], [draft.token_ids.device for draft in drafts]
    if {*sizes} != {len(max_draft_tokens)}:
        raise ConfigError(
            f"drafts for {', '.join(map(str, sizes))} requests do not merge under {len(max_draft_tokens)} budgets: "
            f"give drafts over one batch, with empty trees where there is no guess, and one budget for each request"
        )
    if len({*devices}) > 1:
        raise ConfigError(f"drafts on {', '.join(map(str, devices))} do not merge: make them on one device")
    for i, draft in enumerate(drafts):
        if draft.q_rows is not None and bool((draft.q_rows >= 0).any()):
            raise ConfigError(
                f"drafts[{i}] has sampled nodes, which do not merge: to drop one, or to unite it with its twin, bends "
                f"the distribution that is verified (rule 3 in docs/losslessness.md). Merge chosen nodes alone"
            )
