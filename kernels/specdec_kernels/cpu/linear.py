"""Linear layers that read their weights from memory once, in order, for all input rows (tokens) of a forward pass. A
row's result does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import prange

from specdec_core import compiled, ops
from specdec_kernels.cpu.bits import array_at, as_array, inner
from specdec_kernels.cpu.lanes import LANES, is_supported
from specdec_kernels.cpu.products import MOST_ROWS, MOST_STRIPS, multiply
from specdec_kernels.cpu.threads import WORTH_A_THREAD, in_parallel


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The compiled form of `specdec_core.ops.linear.pack_linear`. Calls the reference implementation if the processor
    lacks the instructions for the weight's dtype, or if the weight is bfloat16 with an odd number of inputs."""
    if not is_supported(weight.dtype) or weight.shape[1] % _inputs_per_step(weight.dtype):
        return ops.REFERENCE["pack_linear"](weight, bias)
    return PackedProduct(weight, bias)


def _inputs_per_step(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1


class PackedProduct:
    """A linear layer: called with rows [..., num_in], returns [..., num_out]. Raises ValueError for rows of another
    dtype or width.

    No row's result depends on the others.

    Public attributes: strips [num_strips, num_steps, LANES times inputs per step], biases float32
    [num_strips * LANES], num_in, num_out, dtype.
    """

    is_row_invariant = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.num_out, self.num_in = weight.shape
        self.dtype = weight.dtype
        inputs_per_step = _inputs_per_step(weight.dtype)
        num_strips, num_steps = -(-self.num_out // LANES), self.num_in // inputs_per_step
        padded = weight.new_zeros(num_strips * LANES, self.num_in)
        padded[: self.num_out] = weight
        steps = padded.view(num_strips, LANES, num_steps, inputs_per_step).transpose(1, 2)
        self.strips = as_array(steps.contiguous().view(num_strips, num_steps, LANES * inputs_per_step))
        self.biases = np.zeros(num_strips * LANES, dtype=np.float32)
        if bias is not None:
            self.biases[: self.num_out] = bias.float().numpy()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dtype != self.dtype or rows.shape[-1] != self.num_in:  # compiled code would read past the end
            raise ValueError(
                f"rows are {rows.dtype} {list(rows.shape)}: give {self.dtype} [..., {self.num_in}], as the layer's "
                f"weight has it"
            )
        rows = rows.contiguous()
        output = rows.new_empty(*rows.shape[:-1], self.num_out)
        num_rows = rows.numel() // self.num_in
        num_parts = torch.get_num_threads()
        if num_parts == 1 or num_rows * self.num_in * self.num_out < WORTH_A_THREAD:
            _one_part(self.strips, self.biases, rows.data_ptr(), num_rows, 0, 1, output.data_ptr(), self.num_out)
        else:
            args = self.strips, self.biases, rows.data_ptr(), num_rows, num_parts, output.data_ptr(), self.num_out
            in_parallel(_in_parts, *args)
        return output


@compiled(parallel=True)
def _in_parts(
    strips,  # [num_strips, num_steps, LANES times inputs per step]
    biases,  # float32, of all strips
    rows_address,  # of [num_rows, in_features]
    num_rows,
    num_parts,  # number of parts that the strips are cut into, one per thread
    output_address,  # of [num_rows, num_out]
    num_out,
):
    for part in prange(num_parts):
        _one_part(strips, biases, rows_address, num_rows, part, num_parts, output_address, num_out)


@compiled()
def _one_part(strips, biases, rows_address, num_rows, part, num_parts, output_address, num_out):
    rows = array_at(rows_address, (num_rows, strips.shape[1] * strips.shape[2] // LANES), strips)
    output = array_at(output_address, (num_rows, num_out), strips)
    product_part(strips, biases, rows, part, num_parts, False, output)


@inner()
def product_part(strips, biases, rows, part, num_parts, is_added, output):
    """Multiply all rows with one part of the strips, and write the results to their columns of `output`.

    part: number of the part, of num_parts, that the strips are cut into.
    is_added: whether the results, rounded to the dtype, are added to what `output` has.
    """
    strip, end = len(strips) * part // num_parts, len(strips) * (part + 1) // num_parts
    while strip < end:
        num_strips = strips_at_once(end - strip)
        row = 0
        while row < len(rows):
            row += multiply_some(strips, strip, num_strips, rows, row, biases, output, row, strip * LANES, is_added)
        strip += num_strips


@inner()
def strips_at_once(num_left):
    return MOST_STRIPS if num_left >= MOST_STRIPS else 1


@inner()
def multiply_some(strips, strip, num_strips, rows, row, biases, output, to_row, to_column, is_added):
    """Multiply the next few rows, from index `row` on, with num_strips strips: MOST_STRIPS or one. A strip is a panel
    of the weight matrix: the weights of LANES outputs. Compute all rows before the next strips, so that weights are
    read from memory only once. See `multiply`.

    Returns how many rows were computed.
    """
    num_left = len(rows) - row
    if num_strips > 1:
        if num_left > 4:
            multiply(strips, strip, rows, row, biases, output, to_row, to_column, is_added, MOST_ROWS, MOST_STRIPS)
            return min(num_left, MOST_ROWS)
        if num_left > 2:
            multiply(strips, strip, rows, row, biases, output, to_row, to_column, is_added, 4, MOST_STRIPS)
            return num_left
        if num_left == 2:
            multiply(strips, strip, rows, row, biases, output, to_row, to_column, is_added, 2, MOST_STRIPS)
            return 2
        multiply(strips, strip, rows, row, biases, output, to_row, to_column, is_added, 1, MOST_STRIPS)
        return 1
    if num_left > 4 and num_left != 7 and num_left != 8:  # those are twice 4
        multiply(strips, strip, rows, row, biases, output, to_row, to_column, is_added, MOST_ROWS, 1)
        return min(num_left, MOST_ROWS)
    if num_left > 1:
        multiply(strips, strip, rows, row, biases, output, to_row, to_column, is_added, 4, 1)
        return min(num_left, 4)
    multiply(strips, strip, rows, row, biases, output, to_row, to_column, is_added, 1, 1)
    return 1
