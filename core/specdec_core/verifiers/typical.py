"""Typical acceptance (Cai et al. 2024, Medusa): accepts draft tokens that the target finds likely enough. Not
lossless."""

from __future__ import annotations

import torch

from specdec_core.config.verifiers import TypicalConfig
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Verdict
from specdec_core.verifiers.accepted_and_bonus import trace


class TypicalVerifier:
    """Accepts the longest path of typical draft tokens (of equally long ones, the first) and draws the token after it.

    A draft token is typical if the target's probability of it exceeds min(posterior_threshold, posterior_alpha *
    exp(-entropy)). The entropy is that of the target's distribution.
    """

    def __init__(self, config: TypicalConfig) -> None:
        self._config = config

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        layout = draft.layout
        num_rows = len(logits)
        log_probs = logits.log_softmax(dim=-1)
        probs = log_probs.exp()
        entropy = -(probs * log_probs.masked_fill(probs == 0, 0)).sum(dim=-1)
        least = (self._config.posterior_alpha * (-entropy).exp()).clamp(max=self._config.posterior_threshold)

        likely = probs[layout.parent_rows, draft.token_ids] > least[layout.parent_rows]
        is_kept = torch.ones(num_rows, dtype=torch.bool, device=logits.device)
        is_kept[layout.node_rows] = likely & layout.is_alive
        for _ in range(draft.max_depth):  # a node below a refused one is refused
            is_kept &= is_kept[layout.up]
        depths = layout.row_depths.masked_fill(~is_kept, 0)
        deepest = torch.zeros(draft.batch_size, dtype=torch.int64, device=logits.device)
        deepest = deepest.scatter_reduce(0, layout.row_requests, depths, reduce="amax")
        is_end = is_kept & (depths == deepest[layout.row_requests])
        ends = torch.where(is_end, torch.arange(num_rows, device=logits.device), num_rows)
        first = torch.full_like(deepest, num_rows).scatter_reduce(0, layout.row_requests, ends, reduce="amin")
        requests = torch.arange(draft.batch_size, device=logits.device)
        tokens = random.target_token(probs[first], requests, deepest)
        is_possible = probs[layout.parent_rows, draft.token_ids] > 0
        return trace(first, tokens, is_possible, probs[:, 0].isnan(), draft)
