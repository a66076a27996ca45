"""The cross entropy of two distributions over a large vocabulary, with little memory and few passes over it."""

from __future__ import annotations

from typing import Any

import torch


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        normaliser = logits.float().logsumexp(-1)
        ctx.save_for_backward(logits, wanted, normaliser)
        return normaliser - torch.linalg.vecdot(logits.float(), wanted)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, wanted, normaliser = ctx.saved_tensors
        gradient = (logits.float() - normaliser.unsqueeze(-1)).exp_().sub_(wanted).mul_(gradients[0].unsqueeze(-1))
        return gradient.to(logits.dtype), None


def soft_cross_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """[...], of logits [..., vocab] to the distributions that are wanted, float32 [..., vocab] without a gradient."""
    found: torch.Tensor = _SoftCrossEntropy.apply(logits, wanted)
    return found
