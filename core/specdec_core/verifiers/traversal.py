"""Traversal verification (Weng et al. 2025, arXiv 2505.12398): a tree is verified from its leaves up to the root."""

from __future__ import annotations

import torch
from attrs import define

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Stream, Verdict
from specdec_core.ops.residuals import MakeResiduals, Residuals
from specdec_core.verifiers.accepted_and_bonus import trace
from specdec_core.verifiers.siblings import Siblings, proposals_of


class TraversalVerifier:
    """Tries leaf after leaf of a draft tree. Either the whole path to the leaf is accepted, or the leaf is removed, the
    target's distribution after its parent becomes the residual, and the next leaf is tried. On a chain this is block
    verification.

    residuals: the operation of this name.
    """

    def __init__(self, residuals: MakeResiduals = Residuals) -> None:
        self._residuals = residuals

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        siblings, root_rows = Siblings.of(draft), draft.layout.root_rows
        target = self._residuals(logits, proposals_of(draft, siblings, logits.shape[-1]))
        is_possible = target.ratios(draft.layout.node_rows) > 0
        state = _State(target, logits.new_ones(siblings.end + 1))
        requests = torch.arange(draft.batch_size, device=logits.device)
        leaf = state.descend(root_rows, draft, siblings)
        is_going = torch.ones_like(requests, dtype=torch.bool)
        for _ in range(1 + max(draft.num_live_per_request)):
            chance = state.kept[leaf].masked_fill(~is_going, 1).nan_to_num(0)
            is_accepted = random.bernoulli(chance, Stream.ACCEPT, requests, leaf - root_rows)
            # A root's chance is 1, or NaN where the logits are not finite: that request stops here and fails.
            is_going = is_going & ~is_accepted & (leaf != root_rows)
            if siblings.is_over(is_going):
                break
            leaf = torch.where(is_going, state.refuse(leaf, is_going, draft, siblings), leaf)
        token = random.categorical(target.weights(leaf), Stream.RECOVER, requests, leaf - root_rows)
        return trace(leaf, token, is_possible, target.is_nan, draft)


@define(eq=False)
class _State:
    """The probabilities that change while leaves are tried.

    target: what is left of the target's distribution after each row.
    kept: [num_rows + 1], the probability that the path to a row is accepted if all draft tokens below it are rejected.
        The last entry stands for "no node".
    """

    target: Residuals
    kept: torch.Tensor

    def descend(self, rows: torch.Tensor, draft: Draft, siblings: Siblings) -> torch.Tensor:
        """Return the first leaf below each of rows [batch], or the row itself if it has no children. Computes `kept`
        for the rows on the way."""
        for _ in range(draft.max_depth):
            child = siblings.first_child[rows]
            self._enter(child, rows)
            rows = torch.where(child == siblings.end, rows, child)
        return rows

    def refuse(self, leaf: torch.Tensor, is_refused: torch.Tensor, draft: Draft, siblings: Siblings) -> torch.Tensor:
        """Remove the leaves [batch] marked in is_refused, none of them a root, and return the leaf to try next in each
        request."""
        parent = draft.layout.up[leaf]
        kept = self.kept[parent]
        missed = self.target.refuse(torch.where(is_refused, leaf, siblings.end), kept)
        self.kept[parent] = torch.where(is_refused, (missed / (missed + 1 - kept)).nan_to_num(0), kept)
        following = torch.where(is_refused, siblings.next_sibling[leaf], siblings.end)
        self._enter(following, parent)
        below = self.descend(following, draft, siblings)
        return torch.where(following == siblings.end, parent, below)

    def _enter(self, rows: torch.Tensor, parents: torch.Tensor) -> None:
        """Compute `kept` for rows [batch]. Each is a child of the row in parents [batch], or `Siblings.end` (no
        child)."""
        self.kept[rows] = (self.kept[parents] * self.target.ratios(rows)).clamp(max=1)
