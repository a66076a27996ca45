"""Norms and rotary embeddings: the references in torch."""

from __future__ import annotations

import torch


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """hidden [..., width] over the root of its mean square, times weight [width] (Zhang and Sennrich 2019). Computed in
    float32, rounded to hidden's type before the weight is applied, as Llama does it."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(hidden.dtype)


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query [1, num_heads, num_tokens, width] and key [1, num_kv_heads, num_tokens, width] by the angles of cos
    and sin [1, num_tokens, width] (Su et al. 2021). A number's partner stands half a width away, as Llama has it."""
    return _rotate(query, cos.unsqueeze(1), sin.unsqueeze(1)), _rotate(key, cos.unsqueeze(1), sin.unsqueeze(1))


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-right, left), dim=-1) * sin
