"""Norms and rotary embeddings: the reference operations in torch."""

from __future__ import annotations

import torch


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm (Zhang and Sennrich 2019) of hidden [..., width] with weight [width]. Computed in float32
    and rounded to hidden's dtype before the weight is applied, as in Llama."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(hidden.dtype)


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query [1, num_heads, num_tokens, width] and key [1, num_kv_heads, num_tokens, width] by the angles of cos
    and sin [1, num_tokens, width] (Su et al. 2021). Element i is paired with element i + width / 2, as in Llama."""
    return _rotate(query, cos.unsqueeze(1), sin.unsqueeze(1)), _rotate(key, cos.unsqueeze(1), sin.unsqueeze(1))


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-right, left), dim=-1) * sin
