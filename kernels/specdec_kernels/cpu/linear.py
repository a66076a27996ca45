"""Linear layers that read their weights from memory once, in order, for all input rows (tokens) of a forward pass. A
row's result does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import prange

from specdec_core import compiled, ops
from specdec_kernels.cpu import amx
from specdec_kernels.cpu.amx import MOST_TILE_ROWS, TILE_INPUTS, multiply_tiles, release_tiles, set_product_tiles
from specdec_kernels.cpu.bits import array_at, as_array, inner
from specdec_kernels.cpu.lanes import LANES, is_supported
from specdec_kernels.cpu.products import MOST_ROWS, MOST_STRIPS, multiply
from specdec_kernels.cpu.threads import WORTH_A_THREAD, in_parallel

MOST_AT_ONCE = max(MOST_ROWS, MOST_TILE_ROWS)
"""Rows that `multiply_some` computes."""


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
    [num_strips * LANES], num_in, num_out, dtype, uses_amx: whether it is computed by `multiply_tiles`, whatever the
    number of rows.
    """

    is_row_invariant = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.num_out, self.num_in = weight.shape
        self.dtype = weight.dtype
        self.uses_amx = self.num_in % TILE_INPUTS == 0 and amx.serves(weight.dtype)
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
        args = self.strips, self.biases, self.uses_amx, rows.data_ptr(), num_rows, output.data_ptr(), self.num_out
        if num_parts == 1 or num_rows * self.num_in * self.num_out < WORTH_A_THREAD:
            _one_part(*args, 0, 1)
        else:
            in_parallel(_in_parts, *args, num_parts)
        return output


@compiled(parallel=True)
def _in_parts(
    strips,  # [num_strips, num_steps, LANES times inputs per step]
    biases,  # float32, of all strips
    uses_amx,
    rows_address,  # of [num_rows, in_features]
    num_rows,
    output_address,  # of [num_rows, num_out]
    num_out,
    num_parts,  # number of parts that the strips are cut into, one per thread
):
    for part in prange(num_parts):
        _one_part(strips, biases, uses_amx, rows_address, num_rows, output_address, num_out, part, num_parts)


@compiled()
def _one_part(strips, biases, uses_amx, rows_address, num_rows, output_address, num_out, part, num_parts):
    rows = array_at(rows_address, (num_rows, strips.shape[1] * strips.shape[2] // LANES), strips)
    output = array_at(output_address, (num_rows, num_out), strips)
    product_part(strips, biases, uses_amx, rows, part, num_parts, False, output)


@inner()
def product_part(strips, biases, uses_amx, rows, part, num_parts, is_added, output):
    """Multiply all rows with one part of the strips, and write the results to their columns of `output`.

    part: number of the part, of num_parts, that the strips are cut into.
    is_added: whether the results, rounded to the dtype, are added to what `output` has.
    """
    strip, end = len(strips) * part // num_parts, len(strips) * (part + 1) // num_parts
    num_rows = 0
    while strip < end:
        num_strips = strips_at_once(end - strip, uses_amx, len(rows))
        row = 0
        while row < len(rows):
            where = output, row, strip * LANES, is_added
            num_rows = multiply_some(strips, strip, num_strips, uses_amx, num_rows, rows, row, biases, *where)
            row += num_rows
        strip += num_strips
    if uses_amx:
        release_tiles()


@inner()
def strips_at_once(num_left, uses_amx, num_rows):
    """Return with how many strips rows are multiplied at once: MOST_STRIPS or one. Several save reading the rows again;
    but with AMX one after the other comes faster from memory."""
    return MOST_STRIPS if num_left >= MOST_STRIPS and not (uses_amx and num_rows <= MOST_TILE_ROWS) else 1


@inner()
def multiply_some(
    strips, strip, num_strips, uses_amx, num_before, rows, row, biases, output, to_row, to_column, is_added
):
    """Multiply the next few rows, from index `row` on, with num_strips strips: MOST_STRIPS or one. A strip is a panel
    of the weight matrix: the weights of LANES outputs. Compute all rows before the next strips, so that weights are
    read from memory only once. See `multiply`.

    num_before: how many rows the call before this one has computed, 0 for the first: for as many, AMX is set. After the
        last call with uses_amx follows `release_tiles`.

    Returns how many rows were computed: at most MOST_AT_ONCE.
    """
    num_left = len(rows) - row
    if uses_amx:
        num_rows = min(num_left, MOST_TILE_ROWS)
        if num_rows != num_before:
            set_product_tiles(num_rows)
        if num_strips > 1:
            multiply_tiles(strips, strip, rows, row, biases, output, to_row, to_column, is_added, num_rows, MOST_STRIPS)
        else:
            multiply_tiles(strips, strip, rows, row, biases, output, to_row, to_column, is_added, num_rows, 1)
        return num_rows
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
