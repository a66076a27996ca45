"""Linear layers that read their weights from memory once, in order, for all input rows (tokens) of a forward pass. A
row's result does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import njit, prange

from specdec_core import ops
from specdec_kernels.cpu.bits import array_at, as_array, as_stored, compiled
from specdec_kernels.cpu.products import MOST_ROWS, MOST_STRIPS, is_supported, multiply
from specdec_kernels.cpu.threads import in_parallel
from specdec_kernels.cpu.tiles import LANES

WORTH_A_THREAD = 2**17
"""From this many multiplications on, another thread saves more time than it costs."""


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The compiled form of `specdec_core.ops.linear.pack_linear`. Calls the reference implementation if the processor
    lacks the instructions for the weight's dtype, or if the weight is bfloat16 with an odd number of inputs.

    The returned function computes the layer, and raises ValueError for input rows of another dtype or width.
    """
    num_out, num_in = weight.shape
    inputs_per_step = 2 if weight.dtype == torch.bfloat16 else 1
    if not is_supported(weight.dtype) or num_in % inputs_per_step:
        return ops.REFERENCE["pack_linear"](weight, bias)
    num_strips, num_steps = -(-num_out // LANES), num_in // inputs_per_step
    padded = weight.new_zeros(num_strips * LANES, num_in)
    padded[:num_out] = weight
    steps = padded.view(num_strips, LANES, num_steps, inputs_per_step).transpose(1, 2)
    strips = as_array(steps.contiguous().view(num_strips, num_steps, LANES * inputs_per_step))
    biases = np.zeros(num_out, dtype=np.float32) if bias is None else bias.float().numpy()
    dtype, weight_size = weight.dtype, weight.numel()

    def product(rows: torch.Tensor) -> torch.Tensor:
        if rows.dtype != dtype or rows.shape[-1] != num_in:  # compiled code would read past the end
            raise ValueError(
                f"rows are {rows.dtype} {list(rows.shape)}: give {dtype} [..., {num_in}], as the layer's weight has it"
            )
        rows = rows.contiguous()
        output = rows.new_empty(*rows.shape[:-1], num_out)
        num_rows = rows.numel() // num_in
        num_parts = torch.get_num_threads()
        if num_parts == 1 or num_rows * weight_size < WORTH_A_THREAD:
            _one_part(strips, biases, rows.data_ptr(), num_rows, 0, 1, output.data_ptr())
        else:
            in_parallel(_in_parts, strips, biases, rows.data_ptr(), num_rows, num_parts, output.data_ptr())
        return output

    return product


@compiled(parallel=True)
def _in_parts(
    strips,  # [num_strips, num_steps, LANES times inputs per step]
    biases,  # float32 [out_features]
    rows_address,  # of [num_rows, in_features]
    num_rows,
    num_parts,  # number of parts that the strips are cut into, one per thread
    output_address,  # of [num_rows, out_features]
):
    for part in prange(num_parts):
        _one_part(strips, biases, rows_address, num_rows, part, num_parts, output_address)


@compiled()
def _one_part(strips, biases, rows_address, num_rows, part, num_parts, output_address):
    rows = array_at(rows_address, (num_rows, strips.shape[1] * strips.shape[2] // LANES), strips)
    output = array_at(output_address, (num_rows, len(biases)), strips)
    sums = np.empty(MOST_ROWS * MOST_STRIPS * LANES, dtype=np.float32)
    strip, end = len(strips) * part // num_parts, len(strips) * (part + 1) // num_parts
    while strip < end:
        strip += _some_strips(strips, strip, end - strip, biases, rows, output, sums)


@njit
def _some_strips(strips, strip, num_left, biases, rows, output, sums):
    """Compute the outputs of all input rows for the next MOST_STRIPS strips, or for one strip if fewer are left. A
    strip is a panel of the weight matrix: the weights of LANES outputs. All rows are computed before the next strips,
    so that weights are read from memory only once. Returns how many strips were computed."""
    num_strips = MOST_STRIPS if num_left >= MOST_STRIPS else 1
    row = 0
    while row < len(rows):
        num_left_rows = len(rows) - row
        if num_strips > 1:
            if num_left_rows > 4:
                num_rows = 6
                multiply(strips, strip, rows, row, sums, 6, MOST_STRIPS)
            elif num_left_rows > 2:
                num_rows = 4
                multiply(strips, strip, rows, row, sums, 4, MOST_STRIPS)
            elif num_left_rows == 2:
                num_rows = 2
                multiply(strips, strip, rows, row, sums, 2, MOST_STRIPS)
            else:
                num_rows = 1
                multiply(strips, strip, rows, row, sums, 1, MOST_STRIPS)
        elif num_left_rows > 1:
            num_rows = MOST_ROWS
            multiply(strips, strip, rows, row, sums, MOST_ROWS, 1)
        else:
            num_rows = 1
            multiply(strips, strip, rows, row, sums, 1, 1)
        _store(sums, biases, row, min(num_rows, num_left_rows), strip * LANES, num_strips * LANES, output)
        row += num_rows
    return num_strips


@njit
def _store(sums, biases, row, num_rows, first, width, output):
    """Add the biases to the sums of num_rows rows, and write the results to `output`, from row `row` and column
    `first` on. Padding columns of the last strip are left out.

    sums: float32, flat; `width` numbers per row.
    """
    for i in range(num_rows):
        for j in range(min(width, output.shape[1] - first)):
            output[row + i, first + j] = as_stored(output, sums[i * width + j] + biases[first + j])
