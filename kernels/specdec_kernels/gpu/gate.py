"""The gate of an MLP: the activation of one half of each row, times the other half."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.gpu.interpreted import AS_WRITTEN, round_to

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""Numbers of the activations in `specdec_core.ops.decoder.ACTIVATIONS`."""
BLOCK = 1024
TWICE_ROOT_OF_2_BY_PI, CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)
"""Of the approximation of GELU by tanh (Hendrycks and Gimpel 2016)."""


def gated(rows: torch.Tensor, activation: str) -> torch.Tensor:
    """Return [num_rows, width]. rows: [num_rows, 2 * width], contiguous."""
    num_rows, width = len(rows), rows.shape[1] // 2
    output = rows.new_empty(num_rows, width)
    if num_rows:
        grid = num_rows, triton.cdiv(width, BLOCK)
        number = ACTIVATIONS[activation]
        _gate[grid](rows, output, width, ACTIVATION=number, BLOCK=BLOCK, num_warps=4, **AS_WRITTEN)
    return output


@triton.jit
def _gate(rows_at, output_at, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    gate = tl.load(rows_at + row * 2 * width + column, mask=is_there, other=0.0)
    up = tl.load(rows_at + row * 2 * width + width + column, mask=is_there, other=0.0)
    wide = gate.to(tl.float32)
    if ACTIVATION == 0:
        active = wide * _sigmoid(wide)
    else:  # 0.5 (1 + tanh(x)) is sigmoid(2 x)
        active = wide * _sigmoid((wide + wide * wide * wide * CUBIC) * TWICE_ROOT_OF_2_BY_PI)
    active = round_to(active, gate.dtype).to(tl.float32)
    tl.store(output_at + row * width + column, round_to(active * up.to(tl.float32), gate.dtype), mask=is_there)


@triton.jit
def _sigmoid(numbers):
    """Without overflow, however large the numbers are."""
    small = tl.exp(-tl.abs(numbers))
    return tl.where(numbers >= 0, 1.0, small) / (1.0 + small)
