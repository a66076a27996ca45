"""Rejection sampling from the root down: Leviathan et al. 2023 for chains; for siblings SpecInfer (Miao et al. 2023),
drawn with replacement, and Sequoia (Chen et al. 2024), without."""

from __future__ import annotations

import torch

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Stream, Verdict
from specdec_core.ops.residuals import MakeResiduals, Proposals, Residuals
from specdec_core.verifiers.accepted_and_bonus import trace
from specdec_core.verifiers.siblings import Siblings, proposals_of


class RejectionVerifier:
    """Walks down from the root (the request's last token). At each step it tries the sampled children in the order they
    were drawn: a child is accepted with probability min(1, target_probs / draft_probs) of its token; after a rejection,
    target_probs becomes the residual max(0, target_probs - draft_probs), normalized. If all are rejected, a token is
    drawn from the residual. If a deterministic (not sampled) child equals this token, the walk goes on there.

    If no draft token was sampled, the output equals plain decoding token for token.

    residuals: the operation of this name.
    """

    def __init__(self, residuals: MakeResiduals = Residuals) -> None:
        self._residuals = residuals

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        layout, siblings = draft.layout, Siblings.of(draft)
        proposals = proposals_of(draft, siblings, logits.shape[-1])
        target = self._residuals(logits, proposals)
        is_possible = target.ratios(layout.node_rows) > 0
        requests = torch.arange(draft.batch_size, device=logits.device)
        rows, tokens = layout.root_rows, torch.zeros_like(layout.root_rows)
        is_going = torch.ones_like(requests, dtype=torch.bool)
        for _ in range(draft.max_depth + 1):
            child, is_open = self._try_sampled(rows, is_going, siblings, proposals, target, random)
            drawing = is_open.nonzero().squeeze(1) if logits.device.type == "cpu" else requests
            weights = target.weights(torch.where(is_open, rows, siblings.end)[drawing])
            drawn = random.target_token(weights, drawing, layout.row_depths[rows[drawing]])
            tokens = torch.where(is_open, tokens.index_copy(0, drawing, drawn), tokens)
            differs = is_open & (child != siblings.end) & (proposals.token_ids[child] != tokens)
            for _ in range(siblings.most):
                if siblings.is_over(differs):
                    break
                child = torch.where(differs, siblings.next_sibling[child], child)
                differs = differs & (child != siblings.end) & (proposals.token_ids[child] != tokens)
            is_going = is_going & (child != siblings.end)
            rows = torch.where(is_going, child, rows)
            if siblings.is_over(is_going):
                break
        return trace(rows, tokens, is_possible, target.is_nan, draft)

    @staticmethod
    def _try_sampled(
        rows: torch.Tensor,
        is_open: torch.Tensor,
        siblings: Siblings,
        proposals: Proposals,
        target: Residuals,
        random: RandomSource,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Try the sampled children of the node that each request's walk has reached, and reject those that are not
        accepted.

        rows: int64 [batch], that node's row of target logits.
        is_open: bool [batch], the requests that are still walking down.
        target: the target's distributions, of which the residuals are left.

        Returns the row of the accepted child (or else of the first that is not sampled), and is_open without the
        requests in which a child was accepted.
        """
        requests = torch.arange(len(rows), device=rows.device)
        child = siblings.first_child[rows]
        is_tried = is_open & proposals.is_sampled(child)
        for _ in range(siblings.most):
            if siblings.is_over(is_tried):
                break
            ratio = target.ratios(child).clamp(max=1)
            node = child - siblings.root_rows
            is_accepted = random.bernoulli(ratio.masked_fill(~is_tried, 1), Stream.ACCEPT, requests, node)
            is_open = is_open & ~(is_tried & is_accepted)
            is_refused = is_tried & ~is_accepted
            target.refuse(torch.where(is_refused, child, siblings.end), torch.ones_like(ratio))
            child = torch.where(is_refused, siblings.next_sibling[child], child)
            is_tried = is_open & proposals.is_sampled(child)
        return child, is_open
