"""Root mean square norm (Zhang and Sennrich 2019): the reference in torch."""

from __future__ import annotations

import torch


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """hidden [..., width] over the root of its mean square, times weight [width]. Computed in float32, rounded to
    hidden's type before the weight is applied, as Llama does it."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(hidden.dtype)
