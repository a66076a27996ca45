"""The most likely tokens of each row of logits, with log probabilities: first of each part of a row, then of the parts.
Nothing is sorted, and the logits are read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_core.ops.top_tokens import most_likely as reference

PART = 2048
"""Columns of a part. It is the same for all rows, whatever else is looked for."""
MOST_FOUND = 2**14
"""Tokens of all parts of a row that are compared in the end."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def most_likely(logits: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `specdec_core.ops.top_tokens.most_likely`, which takes other dtypes and larger numbers. The first of equally
    likely tokens come first."""
    num_rows, num_columns = logits.shape
    number, num_parts = min(number, num_columns), triton.cdiv(num_columns, PART)
    of_part = min(number, PART)
    if logits.dtype not in DTYPES or num_parts * of_part > MOST_FOUND:
        return reference(logits, number)
    log_probs = torch.empty(num_rows, number, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, number, dtype=torch.int64, device=logits.device)
    if num_rows and number:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        found = torch.empty(num_rows, num_parts, of_part, dtype=torch.int64, device=logits.device)
        sums = torch.empty(num_rows, num_parts, 2, dtype=torch.float32, device=logits.device)
        _top_of_part[(num_rows, num_parts)](
            logits, found, sums, logits.stride(0), num_columns, num_parts, of_part, PART, num_warps=8
        )
        blocks = triton.next_power_of_2(num_parts), triton.next_power_of_2(num_parts * of_part)
        num_warps = min(16, max(4, blocks[1] // 512))
        sizes = num_parts, of_part, number, *blocks
        _top_of_row[(num_rows,)](found, sums, log_probs, tokens, *sizes, num_warps=num_warps)
    return log_probs, tokens


@triton.jit
def _keys(logit, column):
    """Whole numbers that are larger for larger logits, and of equal logits for the smaller column. All are positive."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)  # two zeros are equal
    rank = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64) + 2**31
    return (rank << 31) + (0x7FFFFFFF - column)


@triton.jit(do_not_specialize=["number"])
def _top_of_part(logits_at, found_at, sums_at, stride, num_columns, num_parts, number, PART: tl.constexpr):
    """One part of one row: its most likely tokens, its largest logit and the sum of exp(logit - largest), which is NaN
    if a logit is NaN or +inf."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    is_there = column < num_columns
    logit = tl.load(logits_at + row * stride + column, mask=is_there, other=float("-inf")).to(tl.float32)
    is_sound = logit < float("inf")
    sound = tl.where(is_sound, logit, float("-inf"))
    largest = tl.max(sound)
    total = tl.sum(tl.exp(sound - tl.where(largest > float("-inf"), largest, 0.0)))
    of_part = row * num_parts + part
    tl.store(sums_at + 2 * of_part, largest)
    tl.store(sums_at + 2 * of_part + 1, tl.where(tl.min(is_sound.to(tl.int32)) > 0, total, float("nan")))
    key = tl.where(is_there, _keys(logit, column), -1)
    for i in range(number):
        best = tl.max(key)
        tl.store(found_at + of_part * number + i, best)
        key = tl.where(key == best, -1, key)


@triton.jit(do_not_specialize=["of_part", "number"])
def _top_of_row(
    found_at,
    sums_at,
    log_probs_at,
    tokens_at,
    num_parts,
    of_part,
    number,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_FOUND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = row * num_parts + tl.arange(0, BLOCK_PARTS)
    is_part = tl.arange(0, BLOCK_PARTS) < num_parts
    of_parts = tl.load(sums_at + 2 * part, mask=is_part, other=float("-inf"))
    sums = tl.load(sums_at + 2 * part + 1, mask=is_part, other=0.0)
    largest = tl.max(of_parts)
    largest = tl.where(largest > float("-inf"), largest, 0.0)
    total = tl.sum(sums * tl.exp(of_parts - largest))
    log_total = tl.log(tl.where(total > 0, total, float("nan")))
    place = tl.arange(0, BLOCK_FOUND)
    num_found = num_parts * of_part
    key = tl.load(found_at + row * num_found + place, mask=place < num_found, other=-1)
    for i in range(number):
        best = tl.max(key)
        key = tl.where(key == best, -1, key)
        rank = ((best >> 31) - 2**31).to(tl.int32)
        logit = tl.where(rank >= 0, rank, rank ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
        tl.store(log_probs_at + row * number + i, logit - largest - log_total)
        tl.store(tokens_at + row * number + i, 0x7FFFFFFF - (best & 0x7FFFFFFF))
