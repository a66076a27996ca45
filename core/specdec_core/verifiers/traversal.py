"""Traversal verification (Weng et al. 2025, arXiv 2505.12398): a tree is verified from its leaves up to the root."""

from __future__ import annotations

import torch
from attrs import define

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Stream, Verdict
from specdec_core.verifiers.accepted_and_bonus import trace
from specdec_core.verifiers.siblings import Proposals, Siblings, normalize, residual


class TraversalVerifier:
    """Tries leaf after leaf of a draft tree. Either the whole path to the leaf is accepted, or the leaf is removed, the
    target's distribution after its parent becomes the residual, and the next leaf is tried. On a chain this is block
    verification."""

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        siblings = Siblings.of(draft)
        proposals = Proposals(draft, siblings, logits.shape[-1], logits.dtype)
        probs = logits.softmax(dim=-1)
        state = _State(torch.nn.functional.pad(probs, (0, 0, 0, 1)), probs.new_ones(len(probs) + 1))
        requests = torch.arange(draft.batch_size, device=logits.device)
        leaf = state.descend(draft.layout.root_rows, draft, siblings, proposals)
        is_going = torch.ones_like(requests, dtype=torch.bool)
        for _ in range(1 + max(draft.num_live_per_request)):
            chance = state.kept[leaf].masked_fill(~is_going, 1).nan_to_num(0)
            is_accepted = random.bernoulli(chance, Stream.ACCEPT, requests, leaf - draft.layout.root_rows)
            # A root's chance is 1, or NaN where the logits are not finite: that request stops here and fails.
            is_going = is_going & ~is_accepted & (leaf != draft.layout.root_rows)
            if siblings.is_over(is_going):
                break
            leaf = torch.where(is_going, state.refuse(leaf, is_going, draft, siblings, proposals), leaf)
        token = random.categorical(state.left[leaf], Stream.RECOVER, requests, leaf - draft.layout.root_rows)
        return trace(leaf, token, probs, draft)


@define(eq=False)
class _State:
    """The probabilities that change while leaves are tried. There is a row per root and per draft token, and a last row
    that stands for "no node".

    left: [num_rows + 1, vocab], the residual of the target's distribution after each row.
    kept: [num_rows + 1], the probability that the path to a row is accepted if all draft tokens below it are rejected.
    """

    left: torch.Tensor
    kept: torch.Tensor

    def descend(self, rows: torch.Tensor, draft: Draft, siblings: Siblings, proposals: Proposals) -> torch.Tensor:
        """Return the first leaf below each of rows [batch], or the row itself if it has no children. Computes `kept`
        for the rows on the way."""
        for _ in range(draft.max_depth):
            child = siblings.first_child[rows]
            self._enter(child, rows, proposals)
            rows = torch.where(child == siblings.end, rows, child)
        return rows

    def refuse(
        self, leaf: torch.Tensor, is_refused: torch.Tensor, draft: Draft, siblings: Siblings, proposals: Proposals
    ) -> torch.Tensor:
        """Remove the leaves [batch] marked in is_refused, none of them a root, and return the leaf to try next in each
        request."""
        parent = draft.layout.up[leaf]
        kept, left = self.kept[parent], self.left[parent]
        rest = residual(kept.unsqueeze(1) * left, proposals.of(leaf))
        missed = rest.sum(dim=1)
        self.kept[parent] = torch.where(is_refused, (missed / (missed + 1 - kept)).nan_to_num(0), kept)
        self.left[parent] = torch.where(is_refused.unsqueeze(1), normalize(rest, otherwise=left), left)
        following = torch.where(is_refused, siblings.next_sibling[leaf], siblings.end)
        self._enter(following, parent, proposals)
        below = self.descend(following, draft, siblings, proposals)
        return torch.where(following == siblings.end, parent, below)

    def _enter(self, rows: torch.Tensor, parents: torch.Tensor, proposals: Proposals) -> None:
        """Compute `kept` for rows [batch]. Each is a child of the row in parents [batch], or `Siblings.end` (no
        child)."""
        own = self.left[parents].gather(1, proposals.token_ids(rows).unsqueeze(1)).squeeze(1)
        self.kept[rows] = (self.kept[parents] * own / proposals.own_probs[rows]).clamp(max=1)
