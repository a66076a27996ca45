"""Draws tokens by inverting the cumulative distribution, without sorting: first the sum of each part of a row, then the
place within one part."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_core.ops.drawing import draw as reference

PART, BLOCK = 4096, 1024
"""Columns of a part, and those that are summed at once. They are the same for all rows, whatever else is drawn."""
MOST_PARTS = 1024
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """As `specdec_core.ops.drawing.draw`, which draws from other dtypes and from longer rows."""
    num_rows, num_columns = weights.shape
    num_parts = triton.cdiv(num_columns, PART)
    if weights.dtype not in DTYPES or num_parts > MOST_PARTS:
        return reference(weights, uniform)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=weights.device)
    if num_rows:
        weights = weights if weights.stride(1) == 1 else weights.contiguous()
        sums = torch.empty(num_rows, num_parts, dtype=torch.float64, device=weights.device)
        sizes = weights.stride(0), num_columns, num_parts
        _sum_parts[(num_rows, num_parts)](weights, sums, *sizes, PART, BLOCK)
        block_parts = triton.next_power_of_2(num_parts)
        _pick[(num_rows,)](weights, sums, uniform.contiguous(), tokens, *sizes, PART, BLOCK, block_parts)
    return tokens


@triton.jit
def _sum_parts(weights_at, sums_at, stride, num_columns, num_parts, PART: tl.constexpr, BLOCK: tl.constexpr):
    """One part of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, PART, BLOCK):
        column = part * PART + first + tl.arange(0, BLOCK)
        weight = tl.load(weights_at + row * stride + column, mask=column < num_columns, other=0.0)
        total += weight.to(tl.float64)
    tl.store(sums_at + row * num_parts + part, tl.sum(total))


@triton.jit
def _pick(
    weights_at,
    sums_at,
    uniform_at,
    tokens_at,
    stride,
    num_columns,
    num_parts,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """One row. The token is the first one with a weight at which the cumulative sum exceeds the threshold. Where
    rounding leaves none in the part, it is the last one with a weight."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_PARTS)
    sums = tl.load(sums_at + row * num_parts + part, mask=part < num_parts, other=0.0)
    cumulative = tl.cumsum(sums)
    threshold = tl.load(uniform_at + row) * tl.sum(tl.where(part == num_parts - 1, cumulative, 0.0))
    is_passed = (cumulative <= threshold) | (sums <= 0)
    chosen = tl.min(tl.where(is_passed, BLOCK_PARTS, part))
    last_part = tl.max(tl.where(sums > 0, part, 0))
    chosen = tl.minimum(chosen, last_part)
    before = tl.sum(tl.where(part == chosen - 1, cumulative, 0.0))
    found = chosen * PART + PART
    last = chosen * PART
    for first in range(0, PART, BLOCK):
        column = chosen * PART + first + tl.arange(0, BLOCK)
        weight = tl.load(weights_at + row * stride + column, mask=column < num_columns, other=0.0).to(tl.float64)
        reached = before + tl.cumsum(weight)
        found = tl.minimum(found, tl.min(tl.where((reached > threshold) & (weight > 0), column, chosen * PART + PART)))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, column, chosen * PART)))
        before += tl.sum(weight)
    tl.store(tokens_at + row, tl.where(found < chosen * PART + PART, found, last).to(tl.int64))
