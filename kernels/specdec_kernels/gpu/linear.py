"""Linear layers that sum in one order, whatever the number of rows.

Libraries choose a kernel by the number of rows, so that a token gets other bits in a batch, or beside draft tokens,
than alone. Here all matrix products have one shape, and sums run over the inputs in chunks whose number follows from
the layer's sizes. The chunks' sums are added in order, by one program or by several.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from specdec_kernels.gpu.interpreted import AS_WRITTEN, product, round_to

BLOCK_ROWS, BLOCK_OUT, BLOCK_IN = 64, 64, 64
FEW_PROGRAMS, LEAST_CHUNK = 256, 512
"""A layer with few outputs has several chunks, of at least so many inputs, that as many programs can run as a GPU has
room for."""
MOST_ROWS_APART = 256
"""With more rows, one program computes all chunks: there are enough programs."""


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """As `specdec_core.ops.linear.pack_linear`. The product is row-invariant, and reads the weight where it lies."""
    if weight.stride(1) != 1 or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    return Product(weight, bias)


class Product:
    """A linear layer: called with rows [..., num_in], returns [..., num_out]. Raises ValueError for rows of another
    dtype or width. No row's result depends on the others."""

    is_row_invariant = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.num_out, self.num_in = weight.shape
        self._weight, self._bias = weight, None if bias is None else bias.contiguous()
        self._num_chunks = num_chunks_of(self.num_out, self.num_in)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dtype != self._weight.dtype or rows.shape[-1] != self.num_in:
            raise ValueError(
                f"rows are {rows.dtype} {list(rows.shape)}: give {self._weight.dtype} [..., {self.num_in}], as the "
                f"layer's weight has it"
            )
        return _linear(rows, self._weight, self._bias, self._num_chunks)


def num_chunks_of(num_out: int, num_in: int) -> int:
    """The number of chunks of a layer's inputs."""
    wanted = FEW_PROGRAMS // triton.cdiv(num_out, BLOCK_OUT)
    return max(1, min(wanted, num_in // LEAST_CHUNK))


def _linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_chunks: int) -> torch.Tensor:
    num_out, num_in = weight.shape
    given = rows.reshape(-1, num_in)
    given = given if given.stride(1) == 1 else given.contiguous()
    output = given.new_empty(len(given), num_out)
    if not len(given):
        return output.view(*rows.shape[:-1], num_out)
    is_apart = num_chunks > 1 and len(given) <= MOST_ROWS_APART
    sums = output
    if is_apart:
        sums = given.new_empty((num_chunks, len(given), num_out), dtype=torch.float32)
    bias_at = output if bias is None else bias
    # Rows first: programs that run at the same time read the same weights.
    tiles = triton.cdiv(len(given), BLOCK_ROWS), triton.cdiv(num_out, BLOCK_OUT)
    _multiply[(*tiles, num_chunks if is_apart else 1)](
        given,
        weight,
        bias_at,
        output,
        sums,
        len(given),
        num_out,
        given.stride(0),
        weight.stride(0),
        NUM_IN=num_in,
        CHUNK=triton.cdiv(triton.cdiv(num_in, num_chunks), BLOCK_IN) * BLOCK_IN,
        NUM_CHUNKS=num_chunks,
        IS_APART=is_apart,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_OUT=BLOCK_OUT,
        BLOCK_IN=BLOCK_IN,
        num_warps=4,
        num_stages=4,
        **AS_WRITTEN,
    )
    if is_apart:
        _add_chunks[(len(given), triton.cdiv(num_out, 1024))](
            sums,
            bias_at,
            output,
            len(given),
            num_out,
            NUM_CHUNKS=num_chunks,
            HAS_BIAS=bias is not None,
            BLOCK=1024,
            num_warps=4,
            **AS_WRITTEN,
        )
    return output.view(*rows.shape[:-1], num_out)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    rows_at,
    weight_at,
    bias_at,
    output_at,
    sums_at,
    num_rows,
    num_out,
    row_stride,
    weight_stride,
    NUM_IN: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    IS_APART: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """A tile of the output: one of its chunks, or all."""
    out = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_IN)
    given_at = rows_at + row.to(tl.int64)[:, None] * row_stride + column[None, :]
    weights_at = weight_at + out.to(tl.int64)[None, :] * weight_stride + column[:, None]
    is_row, is_out = row < num_rows, out < num_out
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    first = tl.program_id(2) if IS_APART else 0
    end = first + 1 if IS_APART else NUM_CHUNKS
    for chunk in range(first, end):
        sums = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        begin = chunk * CHUNK
        for start in range(begin, tl.minimum(begin + CHUNK, NUM_IN), BLOCK_IN):
            is_in = start + column < NUM_IN
            given = tl.load(given_at + start, mask=is_row[:, None] & is_in[None, :], other=0.0)
            weights = tl.load(weights_at + start, mask=is_out[None, :] & is_in[:, None], other=0.0)
            sums = product(given, weights, sums)
        total += sums
    is_stored = is_row[:, None] & is_out[None, :]
    at = row.to(tl.int64)[:, None] * num_out + out[None, :]
    if IS_APART:
        apart = tl.program_id(2).to(tl.int64) * num_rows * num_out
        tl.store(sums_at + apart + at, total, mask=is_stored)
    else:
        if HAS_BIAS:
            total += tl.load(bias_at + out, mask=is_out, other=0.0).to(tl.float32)[None, :]
        tl.store(output_at + at, round_to(total, output_at.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_rows"])
def _add_chunks(
    sums_at,
    bias_at,
    output_at,
    num_rows,
    num_out,
    NUM_CHUNKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the chunks of a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < num_out
    total = tl.zeros([BLOCK], tl.float32)
    for chunk in range(NUM_CHUNKS):
        total += tl.load(sums_at + (chunk * num_rows + row) * num_out + column, mask=is_there, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_at + column, mask=is_there, other=0.0).to(tl.float32)
    tl.store(output_at + row * num_out + column, round_to(total, output_at.dtype.element_ty), mask=is_there)
