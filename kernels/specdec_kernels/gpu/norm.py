"""Root mean square norm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_core.ops.elementwise import rms_norm as reference
from specdec_kernels.gpu.interpreted import AS_WRITTEN, round_to

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_COLUMNS = 2**15
"""Wider rows do not fit into the registers of one program."""


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `specdec_core.ops.elementwise.rms_norm`, which computes what has other or mixed dtypes."""
    width = hidden.shape[-1]
    is_alike = hidden.dtype == weight.dtype and hidden.dtype in DTYPES and weight.shape == (width,)
    if not is_alike or width > MOST_COLUMNS:
        return reference(hidden, weight, eps)
    rows = hidden.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    if len(rows):
        block = triton.next_power_of_2(width)
        num_warps = min(16, max(1, block // 512))
        _norm[(len(rows),)](
            rows,
            weight.contiguous(),
            output,
            eps,
            rows.stride(0),
            WIDTH=width,
            BLOCK=block,
            num_warps=num_warps,
            **AS_WRITTEN,
        )
    return output.view(hidden.shape)


@triton.jit
def _norm(hidden_at, weight_at, output_at, eps, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_there = column < WIDTH
    given = tl.load(hidden_at + row * stride + column, mask=is_there, other=0.0)
    wide = given.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
    weight = tl.load(weight_at + column, mask=is_there)
    # Rounded before the weight is applied, as in Llama.
    scaled = weight.to(tl.float32) * round_to(normed, given.dtype).to(tl.float32)
    tl.store(output_at + row * WIDTH + column, round_to(scaled, given.dtype), mask=is_there)
