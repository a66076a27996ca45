"""Root mean square norm in one pass over memory."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core import ops
from specdec_kernels.cpu.bits import FAST, LIKE, array_at, as_stored, compiled, load


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


@compiled(fastmath=FAST)
def _rms_norm(like, hidden_address, shape, weight_address, eps, output_address):
    """Normalize each row of the array `hidden`, and write the result to the array `output`.

    like: an array with the dtype of all arrays.
    shape: num_rows and width, the shape of hidden and output; weight is [width].
    """
    num_rows, width = shape
    hidden = array_at(hidden_address, shape, like)
    output = array_at(output_address, shape, like)
    weight = array_at(weight_address, (width,), like)
    for row in range(num_rows):
        squares = np.float32(0)
        for i in range(width):
            number = load(hidden[row, i])
            squares += number * number
        scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
        for i in range(width):
            normed = load(as_stored(output, load(hidden[row, i]) * scale))
            output[row, i] = as_stored(output, normed * load(weight[i]))
