"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_core.ops.elementwise import rotary as reference
from specdec_kernels.gpu.interpreted import AS_WRITTEN, round_to

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `specdec_core.ops.elementwise.rotary`, to the last bit. That computes what has other or mixed dtypes."""
    if len({each.dtype for each in (query, key, cos, sin)}) > 1 or query.dtype not in DTYPES:
        return reference(query, key, cos, sin)
    cos, sin = (each if each.stride(2) == 1 else each.contiguous() for each in (cos, sin))
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    _, num_heads, num_tokens, width = heads.shape
    heads = heads if heads.stride(3) == 1 else heads.contiguous()
    output = heads.new_empty(1, num_tokens, num_heads, width).transpose(1, 2)  # as attention reads it
    if heads.numel():
        _rotate[(num_tokens,)](
            heads,
            cos,
            sin,
            output,
            heads.stride(2),
            heads.stride(1),
            cos.stride(1),
            sin.stride(1),
            output.stride(2),
            output.stride(1),
            NUM_HEADS=num_heads,
            HALF=width // 2,
            BLOCK_HEADS=triton.next_power_of_2(num_heads),
            BLOCK_HALF=triton.next_power_of_2(width // 2),
            num_warps=4,
            **AS_WRITTEN,
        )
    return output


@triton.jit
def _rotate(
    heads_at,
    cos_at,
    sin_at,
    output_at,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    output_token_stride,
    output_head_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    is_column = column < HALF
    is_there = (head < NUM_HEADS) & is_column
    given = heads_at + token * token_stride + head * head_stride + column
    cos, sin = cos_at + token * cos_stride + column, sin_at + token * sin_stride + column
    output = output_at + token * output_token_stride + head * output_head_stride + column
    left, right = tl.load(given, mask=is_there), tl.load(given + HALF, mask=is_there)
    cos_left, cos_right = tl.load(cos, mask=is_column), tl.load(cos + HALF, mask=is_column)
    sin_left, sin_right = tl.load(sin, mask=is_column), tl.load(sin + HALF, mask=is_column)
    left, right = rotated(left, right, cos_left, cos_right, sin_left, sin_right)
    tl.store(output, left, mask=is_there)
    tl.store(output + HALF, right, mask=is_there)


@triton.jit
def rotated(left, right, cos_left, cos_right, sin_left, sin_right):
    """The halves of heads, rotated."""
    new_left = _sum(left, cos_left, -right.to(tl.float32), sin_left)
    return new_left, _sum(right, cos_right, left, sin_right)


@triton.jit
def _sum(a, b, c, d):
    """a b + c d; each product is rounded, as torch does it."""
    first = round_to(a.to(tl.float32) * b.to(tl.float32), a.dtype)
    second = round_to(c.to(tl.float32) * d.to(tl.float32), a.dtype)
    return round_to(first.to(tl.float32) + second.to(tl.float32), a.dtype)
