"""Rejection sampling from the root down: Leviathan et al. 2023 for chains; for siblings SpecInfer (Miao et al. 2023),
drawn with replacement, and Sequoia (Chen et al. 2024), without."""

from __future__ import annotations

import torch

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Stream, Verdict
from specdec_core.verifiers.accepted_and_bonus import trace
from specdec_core.verifiers.siblings import Proposals, Siblings, normalize, residual


class RejectionVerifier:
    """Walks down from the root (the request's last token). At each step it tries the sampled children in the order they
    were drawn: a child is accepted with probability min(1, target_probs / draft_probs) of its token; after a rejection,
    target_probs becomes the residual max(0, target_probs - draft_probs), normalized. If all are rejected, a token is
    drawn from the residual. If a deterministic (not sampled) child equals this token, the walk goes on there.

    If no draft token was sampled, the output equals plain decoding token for token.
    """

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        layout, siblings = draft.layout, Siblings.of(draft)
        probs = logits.softmax(dim=-1)
        proposals = Proposals(draft, siblings, logits.shape[-1], logits.dtype)
        requests = torch.arange(draft.batch_size, device=logits.device)
        rows, tokens = layout.root_rows, torch.zeros_like(layout.root_rows)
        is_going = torch.ones_like(requests, dtype=torch.bool)
        for _ in range(draft.max_depth + 1):
            left, child, is_open = self._try_sampled(probs[rows], rows, is_going, siblings, proposals, random)
            drawing = is_open.nonzero().squeeze(1) if logits.device.type == "cpu" else requests
            drawn = random.target_token(left[drawing], drawing, layout.row_depths[rows[drawing]])
            tokens = torch.where(is_open, tokens.index_copy(0, drawing, drawn), tokens)
            differs = is_open & (child != siblings.end) & (proposals.token_ids(child) != tokens)
            for _ in range(siblings.most):
                if siblings.is_over(differs):
                    break
                child = torch.where(differs, siblings.next_sibling[child], child)
                differs = differs & (child != siblings.end) & (proposals.token_ids(child) != tokens)
            is_going = is_going & (child != siblings.end)
            rows = torch.where(is_going, child, rows)
            if siblings.is_over(is_going):
                break
        return trace(rows, tokens, probs, draft)

    @staticmethod
    def _try_sampled(
        left: torch.Tensor,
        rows: torch.Tensor,
        is_open: torch.Tensor,
        siblings: Siblings,
        proposals: Proposals,
        random: RandomSource,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Try the sampled children of the node that each request's walk has reached.

        left: [batch, vocab], the target's probabilities after that node.
        rows: int64 [batch], that node's row of target logits.
        is_open: bool [batch], the requests that are still walking down.

        Returns the residual probabilities, the row of the accepted child (or else of the first that is not sampled),
        and is_open without the requests in which a child was accepted.
        """
        requests = torch.arange(len(rows), device=rows.device)
        child = siblings.first_child[rows]
        is_tried = is_open & proposals.is_sampled(child)
        for _ in range(siblings.most):
            if siblings.is_over(is_tried):
                break
            drawn_from, token = proposals.of(child), proposals.token_ids(child).unsqueeze(1)
            ratio = (left.gather(1, token) / drawn_from.gather(1, token)).squeeze(1).clamp(max=1)
            node = child - siblings.root_rows
            is_accepted = random.bernoulli(ratio.masked_fill(~is_tried, 1), Stream.ACCEPT, requests, node)
            is_open = is_open & ~(is_tried & is_accepted)
            is_refused = is_tried & ~is_accepted
            rest = normalize(residual(left, drawn_from), otherwise=left)
            left = torch.where(is_refused.unsqueeze(1), rest, left)
            child = torch.where(is_refused, siblings.next_sibling[child], child)
            is_tried = is_open & proposals.is_sampled(child)
        return left, child, is_open
