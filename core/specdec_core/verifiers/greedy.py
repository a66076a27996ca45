"""Verification at temperature 0: the target's own token is the argmax."""

from __future__ import annotations

import torch

from specdec_core.types import Draft, RandomSource, Verdict
from specdec_core.verifiers.walk import follow


class GreedyVerifier:
    """Accepts the nodes that equal the argmax at their parents. Draws nothing."""

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        best, tokens = logits.max(dim=-1)
        return follow(tokens, best.isfinite(), draft)
