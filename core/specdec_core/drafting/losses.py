"""Losses and choices that the training of several draft heads shares."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        log_probs = logits.log_softmax(-1, dtype=torch.float32)
        ctx.save_for_backward(log_probs, wanted)
        ctx.dtype = logits.dtype
        loss: torch.Tensor = -torch.linalg.vecdot(log_probs, wanted)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        log_probs, wanted = ctx.saved_tensors
        gradient: torch.Tensor = log_probs.exp().sub_(wanted).mul_(gradients[0].unsqueeze(-1))
        return gradient.to(ctx.dtype), None


def soft_cross_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy [...] of the model's logits [..., vocab] with the probabilities `wanted`, float32 [...,
    vocab]. Only the logits get a gradient.

    Logits in bfloat16 or float16 are converted to float32 here and get gradients of their own dtype.
    """
    found: torch.Tensor = _SoftCrossEntropy.apply(logits, wanted)  # type: ignore[no-untyped-call]
    return found


def token_loss(logits: torch.Tensor, wanted: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross entropy of logits [batch, n, vocab] with the tokens `wanted`, int64 [batch, n], and the
    share of these tokens that have the highest logit. Both are over the positions that count.

    counts: bool [batch, n]. Elsewhere, `wanted` may be anything below vocab.
    """
    weight = counts / counts.sum().clamp(min=1)
    losses = cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="none").view_as(wanted)
    return (losses * weight).sum(), ((logits.argmax(-1) == wanted) * weight).sum()
