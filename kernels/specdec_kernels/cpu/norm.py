"""Root mean square norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec_core import compiled, ops
from specdec_kernels.cpu.bits import LIKE, array_at, as_stored, inner, load
from specdec_kernels.cpu.lanes import LANES, array_data, loader, rounded, spread, store_rounded
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


@inner(error_model="numpy")  # a row of zeros gets NaN with eps 0, not an exception
def norm_row(given, start, weight, eps, rounds_first, output, output_start):
    """Normalize the row of `given` that begins at index `start`, and write it to `output` from output_start on.

    given, output: flat; may be the same array. weight: float32, or as `given`; [width].
    rounds_first: whether the normalized row is rounded before the weight is applied.
    """
    width = len(weight)
    whole = width // LANES * LANES
    squares = sum_of_squares(given, start, start + whole)
    for number in given[start + whole : start + width]:
        squares = multiply_add(load(number), load(number), squares)
    scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
    _norm_lanes(given, start, weight, scale, rounds_first != 0, output, output_start, whole)
    for i in range(whole, width):
        number = load(given[start + i]) * scale
        if rounds_first:
            number = load(as_stored(output, number))
        output[output_start + i] = as_stored(output, number * load(weight[i]))


@intrinsic  # type: ignore[untyped-decorator]
def _norm_lanes(typing_context, given, start, weight, scale, rounds_first, output, output_start, end):
    """Scale the first `end` numbers of a row, and multiply them by the weight, LANES at a time."""
    load_given, load_weight, is_bfloat = loader(given), loader(weight), output.dtype == types.uint16

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given_data, weight_data, output_data = (array_data(context, builder, signature, args, i) for i in (0, 2, 5))
        start, scale, rounds_first, output_start, end = args[1], spread(builder, args[3]), args[4], *args[6:]
        with cgutils.for_range_slice(builder, start.type(0), end, start.type(LANES), start.type) as (i, _):
            numbers = builder.fmul(load_given(builder, given_data, builder.add(start, i)), scale)
            numbers = builder.select(rounds_first, rounded(builder, numbers, is_bfloat), numbers)
            numbers = builder.fmul(numbers, load_weight(builder, weight_data, i))
            store_rounded(builder, numbers, output_data, builder.add(output_start, i), is_bfloat)
        return context.get_dummy_value()

    ints = types.intp, types.intp
    return types.void(given, types.intp, weight, types.float32, types.boolean, output, *ints), generate
