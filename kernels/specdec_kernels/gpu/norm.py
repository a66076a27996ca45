"""Root mean square norms (Zhang and Sennrich 2019), alone and after a residual connection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_core.ops.decoder import Norm
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
    _launch(rows, None, None, Norm(weight, eps, rounds_first=True), rows, output)
    return output.view(hidden.shape)


def add_and_norm(
    hidden: torch.Tensor,
    added: torch.Tensor | None,
    norm_of_added: Norm | None,
    norm: Norm | None,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual connection and the norm after it, in one kernel: total = hidden + norm_of_added(added). Returns total
    and norm(total).

    hidden, added: [num_rows, width] of one dtype, contiguous. added: None: total is hidden.
    norm_of_added, norm: None: left out.
    total: memory for it; None: new.
    """
    if added is None and norm is None:
        return hidden, hidden
    if added is None:
        total = hidden
    elif total is None:
        total = torch.empty_like(hidden)
    output = total if norm is None else torch.empty_like(hidden)
    _launch(hidden, added, norm_of_added, norm, total, output)
    return total, output


def _launch(
    hidden: torch.Tensor,
    added: torch.Tensor | None,
    norm_of_added: Norm | None,
    norm: Norm | None,
    total: torch.Tensor,
    output: torch.Tensor,
) -> None:
    num_rows, width = hidden.shape
    if not num_rows:
        return
    block = triton.next_power_of_2(width)
    _norm[(num_rows,)](
        hidden,
        hidden if added is None else added,
        hidden if norm_of_added is None else norm_of_added.weight.contiguous(),
        hidden if norm is None else norm.weight.contiguous(),
        total,
        output,
        0.0 if norm_of_added is None else norm_of_added.eps,
        0.0 if norm is None else norm.eps,
        hidden.stride(0),
        IS_SUM=added is not None,
        NORMS_ADDED=norm_of_added is not None,
        ROUNDS_ADDED_FIRST=norm_of_added is not None and norm_of_added.rounds_first,
        NORMS=norm is not None,
        ROUNDS_FIRST=norm is not None and norm.rounds_first,
        WIDTH=width,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **AS_WRITTEN,
    )


@triton.jit
def _norm(
    hidden_at,
    added_at,
    added_weight_at,
    weight_at,
    total_at,
    output_at,
    added_eps,
    eps,
    hidden_stride,
    IS_SUM: tl.constexpr,
    NORMS_ADDED: tl.constexpr,
    ROUNDS_ADDED_FIRST: tl.constexpr,
    NORMS: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_there = column < WIDTH
    at = row * WIDTH + column
    total = tl.load(hidden_at + row * hidden_stride + column, mask=is_there, other=0.0)
    if IS_SUM:
        added = tl.load(added_at + at, mask=is_there, other=0.0)
        if NORMS_ADDED:
            weight = tl.load(added_weight_at + column, mask=is_there, other=0.0)
            added = scaled(added, tl.sum(squared(added)), weight, added_eps, WIDTH, ROUNDS_ADDED_FIRST)
        total = round_to(total.to(tl.float32) + added.to(tl.float32), total.dtype)
        tl.store(total_at + at, total, mask=is_there)
    if NORMS:
        weight = tl.load(weight_at + column, mask=is_there, other=0.0)
        normed = scaled(total, tl.sum(squared(total)), weight, eps, WIDTH, ROUNDS_FIRST)
        tl.store(output_at + at, normed, mask=is_there)


@triton.jit
def squared(numbers):
    wide = numbers.to(tl.float32)
    return wide * wide


@triton.jit
def scaled(numbers, sum_of_squares, weight, eps, WIDTH: tl.constexpr, ROUNDS_FIRST: tl.constexpr):
    """Numbers of rows of WIDTH columns, normed. ROUNDS_FIRST: they are rounded before the weight is applied, as in
    Llama; else only after it, as in Gemma."""
    normed = numbers.to(tl.float32) * tl.rsqrt(sum_of_squares / WIDTH + eps)
    if ROUNDS_FIRST:
        normed = round_to(normed, numbers.dtype).to(tl.float32)
    return round_to(normed * weight.to(tl.float32), numbers.dtype)
