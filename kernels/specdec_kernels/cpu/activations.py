"""The activations of gated MLPs (Shazeer 2020)."""

from __future__ import annotations

import numpy as np

from specdec_kernels.cpu.bits import as_stored, inner, load
from specdec_kernels.cpu.exponential import exp_of_differences

SILU, GELU_TANH = range(2)
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}
"""By the name in `DecoderLayer`."""


@inner()
def activate(gates, ups, num_rows, kind, scratch, output, row, column):
    """Write activation(gate) * up of num_rows rows to `output`, from [row, column] on. Each result is rounded to the
    dtype of the arrays.

    gates, ups: [num_rows or more, width], width a multiple of LANES.
    kind: SILU, x * sigmoid(x) (Hendrycks and Gimpel 2016), or GELU_TANH, the tanh approximation of x * Phi(x) (same
        paper): (1 + tanh(y)) / 2 is sigmoid(2 * y).
    scratch: float32 [num_rows * width or more]; overwritten.
    """
    width = gates.shape[1]
    for i in range(num_rows):
        for j in range(width):
            x = load(gates[i, j])
            if kind == GELU_TANH:
                x = np.float32(2 * 0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
            scratch[i * width + j] = x
    sigmoid(scratch, num_rows * width)
    for i in range(num_rows):
        for j in range(width):
            active = load(as_stored(output, load(gates[i, j]) * scratch[i * width + j]))
            output[row + i, column + j] = as_stored(output, active * load(ups[i, j]))


@inner(error_model="numpy")  # a check for division by zero would keep loops from being vectorized
def sigmoid(numbers, end):
    """Replace the float32 numbers[:end] by 1 / (1 + exp(-number)). end: a multiple of LANES."""
    for i in range(end):
        numbers[i] = -numbers[i]
    exp_of_differences(numbers, 0, end, np.float32(0))
    for i in range(end):
        numbers[i] = np.float32(1) / (np.float32(1) + numbers[i])
