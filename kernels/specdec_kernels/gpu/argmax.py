"""The likeliest token of each row of logits: first of each part of a row, then of the parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_core.ops.argmax import likeliest as reference

PART, BLOCK = 4096, 1024
"""Columns of a part, and those that are looked at together."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BEYOND = tl.constexpr(2**31 - 1)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """As `specdec_core.ops.argmax.likeliest`, which takes other dtypes."""
    if logits.dtype not in DTYPES:
        return reference(logits)
    num_rows, num_columns = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        num_parts = triton.cdiv(num_columns, PART)
        bests = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
        places = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
        _best_of_part[(num_rows, num_parts)](
            logits, bests, places, logits.stride(0), num_columns, num_parts, PART, BLOCK
        )
        _best_of_row[(num_rows,)](bests, places, tokens, num_parts, triton.next_power_of_2(num_parts))
    return tokens


@triton.jit
def _best_of_part(
    logits_at, bests_at, places_at, stride, num_columns, num_parts, PART: tl.constexpr, BLOCK: tl.constexpr
):
    """One part of one row: its largest logit, +inf if one is NaN, and the first place that has it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.full([BLOCK], BEYOND, tl.int32)
    is_odd = tl.zeros([BLOCK], tl.int32)
    for first in range(0, PART, BLOCK):
        column = part * PART + first + tl.arange(0, BLOCK)
        logit = tl.load(logits_at + row * stride + column, mask=column < num_columns, other=float("-inf"))
        logit = logit.to(tl.float32)
        is_odd = is_odd | (logit != logit).to(tl.int32)
        is_better = logit > best  # of equal ones the first stays
        place = tl.where(is_better, column, place)
        best = tl.where(is_better, logit, best)
    top = tl.max(best)
    tl.store(places_at + row * num_parts + part, tl.min(tl.where(best == top, place, BEYOND)))
    tl.store(bests_at + row * num_parts + part, tl.where(tl.max(is_odd) > 0, float("inf"), top))


@triton.jit
def _best_of_row(bests_at, places_at, tokens_at, num_parts, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_there = part < num_parts
    best = tl.load(bests_at + row * num_parts + part, mask=is_there, other=float("-inf"))
    place = tl.load(places_at + row * num_parts + part, mask=is_there, other=BEYOND)
    top = tl.max(best)
    token = tl.min(tl.where(best == top, place, BEYOND))
    is_finite = (top < float("inf")) & (top > float("-inf"))
    tl.store(tokens_at + row, tl.where(is_finite, token, -1).to(tl.int64))
