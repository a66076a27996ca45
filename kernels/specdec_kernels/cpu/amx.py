"""AMX, the matrix unit of Intel's processors from Sapphire Rapids on, and the inner loop of linear layers with it.

A register, called tile, has up to MOST_TILE_ROWS rows of _BYTES_OF_ROW bytes. The loop multiplies a tile of input rows
with a tile of weights at once: LANES outputs and TILE_INPUTS inputs, as they lie in a strip (`products`). So these rows
take about as long as one.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec_kernels.cpu.bits import inner
from specdec_kernels.cpu.calls import call_once
from specdec_kernels.cpu.lanes import FLOATS, I32, LANES, array_data, call, features, load_floats
from specdec_kernels.cpu.products import MOST_STRIPS, for_columns, store

MOST_TILE_ROWS, TILE_INPUTS = 16, 32
IS_COMPILED = {"amx-tile", "amx-bf16", "avx512bf16"} <= features()
"""Whether numba compiles for a processor that has the instructions."""
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
"""The system call by which a process asks for the registers, and its arguments (Linux, x86-64)."""
NUM_TILES = 8
_INPUT, _WEIGHTS = MOST_STRIPS, MOST_STRIPS + 1
"""The tiles of the loop are the sums of each strip, then the input, then weights, by turns."""
_BYTES_OF_ROW = 64
_CONFIGURATION = ir.ArrayType(ir.IntType(8), 64)
_NEXT = ir.IntType(64)(_BYTES_OF_ROW)
"""The stride of whole rows that follow one another."""
WHOLE_ROWS = (_BYTES_OF_ROW,) * NUM_TILES


@cache
def is_allowed() -> bool:
    """Whether this process may use the instructions. Linux gives their registers only to processes that ask."""
    if not IS_COMPILED or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def serves(dtype: torch.dtype) -> bool:
    """Whether this process computes with AMX what has this dtype."""
    return dtype == torch.bfloat16 and is_allowed()


@intrinsic  # type: ignore[untyped-decorator]
def set_tiles(typing_context, rows, num_bytes):
    """Give this thread's tiles their sizes, and clear them. Before the thread returns it calls `release_tiles`.

    rows, num_bytes: tuples of NUM_TILES integers, how many rows each tile has, and how many bytes a row.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if IS_COMPILED:
            made = cgutils.alloca_once_value(builder, ir.Constant(_CONFIGURATION, [1, *[0] * 63]))  # 1: the palette
            sizes = builder.bitcast(made, _CONFIGURATION.element.as_pointer())
            for first, kind, given in ((16, ir.IntType(16), args[1]), (48, ir.IntType(8), args[0])):
                data = builder.bitcast(builder.gep(sizes, [I32(first)]), kind.as_pointer())
                for tile, size in enumerate(cgutils.unpack_tuple(builder, given, NUM_TILES)):
                    builder.store(builder.trunc(size, kind), builder.gep(data, [I32(tile)]))
            call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), sizes)
        return context.get_dummy_value()

    return types.void(rows, num_bytes), generate


@intrinsic  # type: ignore[untyped-decorator]
def release_tiles(typing_context):
    """Undo `set_tiles`, so that the system need not keep the registers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if IS_COMPILED:
            call(builder, "llvm.x86.tilerelease", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@inner()
def set_product_tiles(num_rows):
    """Prepare this thread for `multiply_tiles` with so many rows, 1 to MOST_TILE_ROWS."""
    n, most = num_rows, MOST_TILE_ROWS
    set_tiles((n, n, n, n, n, most, most, most), WHOLE_ROWS)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_tiles(
    typing_context, weight, strip, rows, row, biases, output, to_row, to_column, is_added, num_rows, num_strips
):
    """Do what `products.multiply` does, for weights in bfloat16 and a multiple of TILE_INPUTS inputs. Each row is
    summed in an order of its own, which no other row changes; it is not the order of `products.multiply`.

    num_rows: as given to `set_product_tiles` before. All of them are there.
    num_strips: a literal, at most MOST_STRIPS.
    """

    def body(builder: Any, weight_data: Any, num_steps: Any, strip: Any, *args: Any) -> None:
        rows_data, row, biases_data, output_data, width, to_row, to_column, is_added, num_rows = args
        index, strips = num_steps.type, range(num_strips.literal_value)
        row_len = builder.mul(num_steps, index(2))
        strip_len = builder.mul(row_len, index(LANES))
        given = builder.gep(rows_data, [builder.mul(row, row_len)])
        weights = [builder.gep(weight_data, [builder.mul(builder.add(strip, index(s)), strip_len)]) for s in strips]
        for s in strips:
            clear(builder, s)
        with cgutils.for_range_slice(builder, index(0), row_len, index(TILE_INPUTS), index) as (i, _):
            load_tile(builder, _INPUT, builder.gep(given, [i]), builder.mul(row_len, index(2)))
            for s in strips:
                tile = _WEIGHTS + s % (NUM_TILES - _WEIGHTS)
                load_tile(builder, tile, builder.gep(weights[s], [builder.mul(i, index(LANES))]))
                add_products(builder, s, _INPUT, tile)
        sums = cgutils.alloca_once(builder, FLOATS, size=I32(MOST_TILE_ROWS * len(strips)))
        for s in strips:
            store_tile(builder, s, builder.gep(sums, [I32(s * MOST_TILE_ROWS)]))
        first_bias = builder.mul(strip, index(LANES))
        for s in strips:
            column = builder.add(to_column, index(s * LANES))
            bias = load_floats(builder, biases_data, builder.add(first_bias, index(s * LANES)))

            def store_rows(mask: Any, s: int = s, column: Any = column, bias: Any = bias) -> None:
                with cgutils.for_range(builder, num_rows) as loop:
                    total = builder.load(builder.gep(sums, [builder.add(loop.index, index(s * MOST_TILE_ROWS))]))
                    place = builder.add(builder.mul(builder.add(to_row, loop.index), width), column)
                    to = builder.gep(output_data, [place])
                    store(builder, builder.fadd(total, bias), is_added, mask, to, is_bfloat=True)

            for_columns(builder, column, width, store_rows)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if IS_COMPILED and weight.dtype == types.uint16:
            weight_data, rows_data, biases_data, output_data = (
                array_data(context, builder, signature, args, i) for i in (0, 2, 4, 5)
            )
            shapes = [context.make_array(signature.args[i])(context, builder, args[i]).shape for i in (0, 5)]
            num_steps, width = (builder.extract_value(each, 1) for each in shapes)
            name, given = f"multiply_tiles_{num_strips.literal_value}", (weight_data, num_steps, args[1], rows_data)
            call_once(builder, name, body, *given, args[3], biases_data, output_data, width, *args[6:10])
        return context.get_dummy_value()

    places = types.intp, types.intp, types.boolean, types.intp
    return types.void(weight, types.intp, rows, types.intp, biases, output, *places, num_strips), generate


def clear(builder: Any, tile: int) -> None:
    call(builder, "llvm.x86.tilezero", ir.VoidType(), _number(tile))


def load_tile(builder: Any, tile: int, data: Any, stride: Any = _NEXT) -> None:
    """stride: bytes from row to row in memory."""
    call(builder, "llvm.x86.tileloadd64", ir.VoidType(), _number(tile), _bytes_at(builder, data), stride)


def store_tile(builder: Any, tile: int, data: Any, stride: Any = _NEXT) -> None:
    call(builder, "llvm.x86.tilestored64", ir.VoidType(), _number(tile), _bytes_at(builder, data), stride)


def add_products(builder: Any, sums: int, left: int, right: int) -> None:
    """Add to the sums, float32 [m, n], the product of bfloat16 [m, k] and [k / 2, n, 2]."""
    call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), *map(_number, (sums, left, right)))


def _number(tile: int) -> Any:
    return ir.IntType(8)(tile)


def _bytes_at(builder: Any, data: Any) -> Any:
    return builder.bitcast(data, cgutils.voidptr_t)
