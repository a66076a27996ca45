"""Verification at temperature 0: draft tokens are compared with the argmax of the target's logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Verdict
from specdec_core.ops.argmax import likeliest
from specdec_core.verifiers.accepted_and_bonus import follow


class GreedyVerifier:
    """Accepts each draft token that equals the argmax after its parent. Uses no random numbers.

    likeliest: the operation of this name.
    """

    def __init__(self, likeliest: Callable[[torch.Tensor], torch.Tensor] = likeliest) -> None:
        self._likeliest = likeliest

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        return follow(self._likeliest(logits), draft)
