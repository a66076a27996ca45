"""Root mean square norm."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core import compiled, ops
from specdec_kernels.cpu.bits import LIKE, array_at, as_stored, inner, load
from specdec_kernels.cpu.lanes import LANES
from specdec_kernels.cpu.reductions import multiply_add, sum_of_squares


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The compiled form of `specdec_core.ops.elementwise.rms_norm`, with the squares summed in another order. Calls
    the reference implementation for dtypes other than float32 and bfloat16, and for mixed dtypes."""
    if hidden.dtype != weight.dtype or hidden.dtype not in LIKE or hidden.shape[-1:] != weight.shape:
        return ops.REFERENCE["rms_norm"](hidden, weight, eps)
    hidden, weight, width = hidden.contiguous(), weight.contiguous(), weight.shape[0]
    output = torch.empty_like(hidden)
    shape = hidden.numel() // width, width
    _rms_norm(LIKE[hidden.dtype], hidden.data_ptr(), shape, weight.data_ptr(), eps, output.data_ptr())
    return output


@compiled()
def _rms_norm(like, hidden_address, shape, weight_address, eps, output_address):
    """Normalize each row of the array `hidden`, and write the result to the array `output`.

    like: an array with the dtype of all arrays.
    shape: num_rows and width, the shape of hidden and output; weight is [width].
    """
    num_rows, width = shape
    hidden = array_at(hidden_address, (num_rows * width,), like)
    output = array_at(output_address, (num_rows * width,), like)
    weight = array_at(weight_address, (width,), like)
    for row in range(num_rows):
        norm_row(hidden, row * width, weight, eps, True, output, row * width)


@inner()
def norm_row(given, start, weight, eps, rounds_first, output, output_start):
    """Normalize the row of `given` that begins at index `start`, and write it to `output` from output_start on.

    given, output: flat; may be the same array. weight: float32, or as `given`; [width].
    rounds_first: whether the normalized row is rounded before the weight is applied.
    """
    width = len(weight)
    end = start + width // LANES * LANES
    squares = sum_of_squares(given, start, end)
    for number in given[end : start + width]:
        squares = multiply_add(load(number), load(number), squares)
    scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
    row, normed = given[start : start + width], output[output_start : output_start + width]
    if rounds_first:
        for i in range(width):
            normed[i] = as_stored(output, load(as_stored(output, load(row[i]) * scale)) * load(weight[i]))
    else:
        for i in range(width):
            normed[i] = as_stored(output, load(row[i]) * scale * load(weight[i]))
