"""Losses that the training of several draft heads shares.

They go through the logits in parts that fit into a processor's cache, since logits are the largest tensors of training:
[tokens, vocab] for each text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

NUM_LOGITS = {"cpu": 2**19}
"""Logits of a part, by the type of device."""
NUM_LOGITS_ELSEWHERE = 2**24


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of logits [batch, n, vocab] with token ids, int64 [batch, n], or probabilities, float32 [batch, n,
    vocab]. Keeps the logits for the backward pass, and no copy of them in float32."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, wanted)
        losses = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
        for part in _parts(logits):
            log_probs = logits[part].log_softmax(-1, dtype=torch.float32)
            if wanted.dtype == torch.int64:
                losses[part] = -log_probs.gather(-1, wanted[part].unsqueeze(-1)).squeeze(-1)
            else:
                losses[part] = -(log_probs * wanted[part]).sum(-1)  # vecdot would be in bfloat16 under autocast
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, wanted = ctx.saved_tensors
        found = torch.empty_like(logits)
        for part in _parts(logits):
            error = logits[part].softmax(-1, dtype=torch.float32)
            if wanted.dtype == torch.int64:
                ids = wanted[part].unsqueeze(-1)
                error.scatter_add_(-1, ids, error.new_full(ids.shape, -1))
            else:
                error.sub_(wanted[part])
            found[part] = error.mul_(gradients[0][part].unsqueeze(-1))
        return found, None


def _parts(logits: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the parts of logits [batch, n, vocab], as indices (texts, positions)."""
    batch, length, vocab_size = logits.shape
    size = max(1, NUM_LOGITS.get(logits.device.type, NUM_LOGITS_ELSEWHERE) // vocab_size)
    num_texts = max(1, size // max(1, length))
    for text in range(0, batch, num_texts):
        for start in range(0, length, size):
            yield slice(text, text + num_texts), slice(start, start + size)


def soft_cross_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy [batch, n] of the model's logits [batch, n, vocab] with the probabilities `wanted`,
    float32 [batch, n, vocab], which add up to 1. Only the logits get a gradient, in their own dtype."""
    found: torch.Tensor = _CrossEntropy.apply(logits, wanted)  # type: ignore[no-untyped-call]
    return found


def token_loss(logits: torch.Tensor, wanted: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross entropy of logits [batch, n, vocab] with what is `wanted`, and the `accuracy`. Both are
    over the positions that count.

    wanted: token ids, int64 [batch, n], or probabilities, float32 [batch, n, vocab]; accuracy is then that of the
        likeliest tokens.
    counts: bool [batch, n]. Elsewhere, `wanted` may be anything of its kind, such as any token ids below vocab.
    """
    weight = counts / counts.sum().clamp(min=1)
    losses: torch.Tensor = _CrossEntropy.apply(logits, wanted)  # type: ignore[no-untyped-call]
    return (losses * weight).sum(), accuracy(logits, wanted if wanted.ndim == 2 else wanted.argmax(-1), weight)


@torch.no_grad()
def accuracy(logits: torch.Tensor, wanted: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the share of the tokens `wanted`, int64 [batch, n], that have the highest of the logits [batch, n, vocab],
    alone or with others.

    weight: of each token, float32 [batch, n], which add up to 1.
    """
    is_best = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) >= logits.amax(-1)
    return (is_best * weight).sum()
