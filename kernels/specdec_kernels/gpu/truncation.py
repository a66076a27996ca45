"""Temperature, min-p, top-k and top-p in one kernel, without sorting: the least logit that stays is found digit by
digit, by how many tokens, or how much probability, are at or above each possible rank."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from specdec_core.ops.truncation import truncate as reference
from specdec_core.ops.upload import upload

BLOCK = 256
"""Columns that are looked at together: 16 sums over them fit into a program's registers."""
NUM_DIGITS = tl.constexpr(16)
BEYOND = tl.constexpr(2**31 - 1)


def truncate(
    logits: torch.Tensor, temperature: np.ndarray, min_p: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
) -> torch.Tensor:
    """As `specdec_core.ops.truncation.truncate`, which takes float64, too. Probabilities are summed in float64."""
    if logits.dtype != torch.float32:
        return reference(logits, temperature, min_p, top_k, top_p)
    num_rows, num_columns = logits.shape
    processed = torch.empty(num_rows, num_columns, dtype=torch.float32, device=logits.device)
    if num_rows:
        with np.errstate(divide="ignore"):
            of_rows = np.stack([temperature, np.log(min_p), top_k, top_p])
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        parameters = upload(of_rows, logits.device, torch.float64)
        _truncate[(num_rows,)](logits, parameters, processed, logits.stride(0), num_columns, num_rows, BLOCK)
    return processed


@triton.jit
def _truncate(logits_at, parameters_at, processed_at, stride, num_columns, num_rows, BLOCK: tl.constexpr):
    """One row. Ranks order float32 numbers, as whole numbers of 32 bits."""
    row = tl.program_id(0).to(tl.int64)
    logits_at, processed_at = logits_at + row * stride, processed_at + row * num_columns
    temperature = tl.load(parameters_at + row).to(tl.float32)
    log_min_p = tl.load(parameters_at + num_rows + row).to(tl.float32)
    top_k = tl.load(parameters_at + 2 * num_rows + row)
    top_p = tl.load(parameters_at + 3 * num_rows + row)
    is_greedy = temperature == 0
    divisor = tl.where(is_greedy, 1.0, temperature)

    most, is_sound = _largest(logits_at, divisor, num_columns, BLOCK)
    is_cut = is_sound & ~is_greedy
    lowest = _rank(tl.where(is_sound, most, 0.0) + tl.where(is_greedy, 0.0, log_min_p))  # that stays
    num_last = tl.where(is_greedy, 1, BEYOND)  # the most tokens of this rank that stay
    if is_cut & (top_k > 0):
        found = _found(logits_at, divisor, num_columns, most, top_k, False, BLOCK)
        lowest = tl.where(found > lowest, found, lowest)
    if is_cut & (top_p < 1):
        needed = top_p * _weight(logits_at, divisor, num_columns, lowest, most, BLOCK)
        found = _found(logits_at, divisor, num_columns, most, needed, True, BLOCK)
        lowest = tl.where(found > lowest, found, lowest)
        needed -= _weight(logits_at, divisor, num_columns, lowest + 1, most, BLOCK)
        each = tl.exp(_number(lowest) - most).to(tl.float64)
        num_last = tl.where(each * (BEYOND - 1) > needed, needed / each, BEYOND - 1).to(tl.int32)
        num_last += (num_last * each < needed).to(tl.int32)
        num_last = tl.where(num_last < 1, 1, num_last)

    num_seen = 0
    for first in range(0, num_columns, BLOCK):
        column, logit, rank = _block(logits_at, divisor, first, num_columns, BLOCK)
        is_last = ((rank == lowest) & (column < num_columns)).to(tl.int32)
        stays = (rank > lowest) | ((is_last > 0) & (num_seen + tl.cumsum(is_last) <= num_last))
        num_seen += tl.sum(is_last)
        # A row that is not finite stays as it is, so that its request fails.
        tl.store(processed_at + column, tl.where(stays | ~is_sound, logit, float("-inf")), mask=column < num_columns)


@triton.jit
def _block(logits_at, divisor, first, num_columns, BLOCK: tl.constexpr):
    """Columns, logits divided by the temperature, and their ranks."""
    column = first + tl.arange(0, BLOCK)
    logit = tl.load(logits_at + column, mask=column < num_columns, other=float("-inf"))
    logit = tl.div_rn(logit, divisor + tl.zeros([BLOCK], tl.float32))
    return column, logit, _rank(logit)


@triton.jit
def _rank(number):
    bits = tl.where(number == 0, 0.0, number).to(tl.uint32, bitcast=True)  # two zeros are equal
    return tl.where(bits >> 31 == 0, bits | 0x80000000, bits ^ 0xFFFFFFFF)


@triton.jit
def _number(rank):
    bits = tl.where(rank >> 31 == 1, rank & 0x7FFFFFFF, rank ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _largest(logits_at, divisor, num_columns, BLOCK: tl.constexpr):
    """The largest logit, and whether the row is finite there and has no NaN."""
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    is_nan = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_columns, BLOCK):
        _, logit, _ = _block(logits_at, divisor, first, num_columns, BLOCK)
        is_nan = is_nan | (logit != logit).to(tl.int32)
        most = tl.where(logit > most, logit, most)
    largest = tl.max(most)
    return largest, (tl.max(is_nan) == 0) & (largest < float("inf")) & (largest > float("-inf"))


@triton.jit
def _weight(logits_at, divisor, num_columns, lowest, most, BLOCK: tl.constexpr):
    """The probability, up to a factor, of all tokens of this rank and above it."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, num_columns, BLOCK):
        _, logit, rank = _block(logits_at, divisor, first, num_columns, BLOCK)
        total += tl.where(rank >= lowest, tl.exp(logit - most), 0.0).to(tl.float64)
    return tl.sum(total)


@triton.jit
def _found(logits_at, divisor, num_columns, most, needed, BY_PROBABILITY: tl.constexpr, BLOCK: tl.constexpr):
    """The largest rank so that tokens of this rank and above are `needed` many or likely; 0 if all of them are less."""
    digit = tl.arange(0, NUM_DIGITS).to(tl.uint32)
    found = tl.zeros([1], tl.uint32)
    for i in tl.static_range(8):
        possible = found | (digit << (28 - 4 * i))
        sums = tl.zeros([NUM_DIGITS], tl.float64)
        for first in range(0, num_columns, BLOCK):
            column, logit, rank = _block(logits_at, divisor, first, num_columns, BLOCK)
            weight = (column < num_columns).to(tl.float64)
            if BY_PROBABILITY:
                weight = tl.exp(logit - most).to(tl.float64)
            sums += tl.sum(tl.where(rank[:, None] >= possible[None, :], weight[:, None], 0.0), axis=0)
        reached = tl.where(sums >= needed, digit, 0).to(tl.int32)
        found = found | (tl.max(reached).to(tl.uint32) << (28 - 4 * i))
    return tl.max(found.to(tl.int64)).to(tl.uint32)
