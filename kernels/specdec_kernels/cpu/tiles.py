"""The inner loops of attention: scores, and weighted sums of values. Each call computes one tile, TILE tokens of the KV
cache, with vectors of LANES float32.

Several queries share a tile. A query's result does not depend on the number of queries: the operations and their order
are the same.

One instruction multiplies and adds pairs of bfloat16. Weights are therefore rounded to bfloat16, as in FlashAttention
(Dao et al. 2022); sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec_kernels.cpu.calls import call_once
from specdec_kernels.cpu.lanes import (
    I32,
    LANES,
    REGISTER,
    array_data,
    interleaved,
    lanes_at,
    load_floats,
    spread,
    spread_step,
    step_of,
    variable,
)

TILE = LANES
"""Keys of a tile: one for each lane."""
DOT_STEP = 2 * LANES
"""Queries and keys are padded to a multiple of this width."""
_STRIPS = {8: 2, 4: 4, 2: 4, 1: 4} if REGISTER == LANES else {3: 2, 2: 2, 1: 4}
"""{number of queries computed at a time: vectors of a value summed at a time}: as many as registers can hold sums."""
_SQUARE = ir.VectorType(ir.FloatType(), REGISTER)

_CACHE_LINE = 64


@intrinsic  # type: ignore[untyped-decorator]
def transpose_tile(typing_context, cache, where, width, transposed):
    """Transpose the TILE keys of a tile: write them to `transposed` as one strip of `products.multiply`, in which each
    step has the numbers of all keys side by side.

    cache: float32 or bfloat16. Key j has `width` elements.
    where: places, first_place, stride and offset: key j begins at index places[first_place + j] * stride + offset.
    width: a multiple of DOT_STEP.
    transposed: as the cache, [TILE * width].
    """
    step = step_of(cache)

    def body(builder: Any, cache_data: Any, places_data: Any, *args: Any) -> None:
        stride, offset, width, transposed_data = args
        index = width.type
        keys = [row_at(builder, cache_data, places_data, index(j), stride, offset) for j in range(TILE)]
        with cgutils.for_range_slice(builder, index(0), width, index(step.size * REGISTER), index) as (d, _):
            start = builder.mul(d, index(TILE))
            for first in range(0, TILE, REGISTER):
                square = [lanes_at(builder, key, d, _SQUARE) for key in keys[first : first + REGISTER]]
                rows = transposed_square(builder, [builder.load(row, align=4) for row in square])
                for i, row in enumerate(rows):
                    to = builder.add(start, index((i * TILE + first) * step.size))
                    builder.store(row, lanes_at(builder, transposed_data, to, _SQUARE), align=4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cache_data, transposed_data = (array_data(context, builder, signature, args, i) for i in (0, 3))
        located = unpacked(context, builder, where, args[1])
        call_once(builder, f"transpose_tile_{cache.dtype}", body, cache_data, *located, args[2], transposed_data)
        return context.get_dummy_value()

    return types.void(cache, where, types.intp, transposed), generate


def transposed_square(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose a square of registers: swap quarters of ever larger squares."""
    distance, lanes = 1, range(REGISTER)
    kind = ir.VectorType(I32, REGISTER)
    while distance < REGISTER:
        upper = ir.Constant(kind, [i ^ distance ^ REGISTER if i & distance else i for i in lanes])
        lower = ir.Constant(kind, [i ^ REGISTER if i & distance else i ^ distance for i in lanes])
        for i in lanes:
            if not i & distance:
                a, b = rows[i], rows[i + distance]
                rows[i], rows[i + distance] = builder.shuffle_vector(a, b, upper), builder.shuffle_vector(a, b, lower)
        distance *= 2
    return rows


@intrinsic  # type: ignore[untyped-decorator]
def dot_tile(typing_context, queries, width, start, end, transposed, scaling, scores, row_len, column):
    """Compute the scores (dot products times `scaling`) of queries start to end - 1 with the TILE keys of a tile. The
    score of query q and key j is written to scores[q * row_len + column + j].

    queries: as the keys. Query q has `width` elements, from index q * width on.
    transposed: the keys as `transpose_tile` writes them.
    """
    step = step_of(transposed)

    def some_queries(number: int, builder: Any, query_data: Any, width: Any, transposed_data: Any, *args: Any) -> None:
        scaling, scores_data, row_len = args
        index = width.type
        queries = [builder.gep(query_data, [builder.mul(width, index(q))]) for q in range(number)]
        sums = [(variable(builder), variable(builder)) for _ in queries]  # of even and odd steps, added in parallel
        with cgutils.for_range_slice(builder, index(0), width, index(2 * step.size), index) as (d, _):
            for half in range(2):
                at = builder.add(d, index(half * step.size))
                keys = step.load(builder, transposed_data, builder.mul(at, index(TILE)))
                for query, totals in zip(queries, sums, strict=True):
                    factor, total = spread_step(builder, query, at, step), builder.load(totals[half])
                    builder.store(step.add_product(builder, factor, keys, total), totals[half])
        scalings = spread(builder, scaling)
        for q, (even, odd) in enumerate(sums):
            score = builder.fmul(builder.fadd(builder.load(even), builder.load(odd)), scalings)
            builder.store(score, lanes_at(builder, scores_data, builder.mul(row_len, index(q))), align=4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, width, start, end, _, scaling, _, row_len, column = args
        queries, transposed_data, scores = (array_data(context, builder, signature, args, i) for i in (0, 4, 6))

        def call(number: int, i: Any) -> None:
            first = builder.gep(queries, [builder.mul(i, width)])
            to = builder.gep(scores, [builder.add(builder.mul(i, row_len), column)])
            name, body = f"dot_tile_{transposed.dtype}_{number}", partial(some_queries, number)
            call_once(builder, name, body, first, width, transposed_data, scaling, to, row_len)

        in_groups(builder, start, end, call)
        return context.get_dummy_value()

    ints = [types.intp] * 3
    return types.void(queries, *ints, transposed, types.float32, scores, *ints[:2]), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_tile(typing_context, weights, row_len, column, start, end, cache, where, num_values, output, width):
    """For queries start to end - 1, add the weighted sum of a tile's first num_values values to each query's output.
    Values are added in order, in bfloat16 two at a time: if their number is odd, the next one is added, too, and has to
    have weight 0.

    weights: as the cache. The weight of value j for query q is weights[q * row_len + column + j].
    cache, where: as for `transpose_tile`, of values.
    output: float32. The output of query q has `width` elements, from index q * width on.
    """
    step = step_of(cache)

    def some_queries(number: int, builder: Any, weights_data: Any, row_len: Any, cache_data: Any, *args: Any) -> None:
        places_data, stride, offset, num_values, output_data, width = args
        index = width.type
        rows, outputs = (
            [builder.gep(data, [builder.mul(length, index(q))]) for q in range(number)]
            for data, length in ((weights_data, row_len), (output_data, width))
        )

        def add_strip(d: Any, num_vectors: int) -> None:
            steps = [builder.add(d, index(i * LANES)) for i in range(num_vectors)]
            totals = [[variable(builder, load_floats(builder, each, at)) for at in steps] for each in outputs]
            with cgutils.for_range_slice(builder, index(0), num_values, index(step.size), index) as (j, _):
                places = [builder.add(j, index(i)) for i in range(step.size)]
                data = [row_at(builder, cache_data, places_data, place, stride, offset) for place in places]
                found = interleaved(builder, data, d, num_vectors, step)
                for row, row_totals in zip(rows, totals, strict=True):
                    weight = spread_step(builder, row, j, step)
                    for value, total in zip(found, row_totals, strict=True):
                        builder.store(step.add_product(builder, weight, value, builder.load(total)), total)
            for each, row_totals in zip(outputs, totals, strict=True):
                for at, total in zip(steps, row_totals, strict=True):
                    builder.store(builder.load(total), lanes_at(builder, each, at), align=4)

        strip = _STRIPS[number]
        whole = builder.sub(width, builder.srem(width, index(strip * LANES)))
        for_strips(builder, index(0), whole, strip, add_strip)
        for_strips(builder, whole, width, 1, add_strip)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, row_len, column, start, end, _, _, num_values, _, width = args
        weights_data, cache_data, output_data = (array_data(context, builder, signature, args, i) for i in (0, 5, 8))
        located = unpacked(context, builder, where, args[6])

        def call(number: int, i: Any) -> None:
            first = builder.gep(weights_data, [builder.add(builder.mul(i, row_len), column)])
            to = builder.gep(output_data, [builder.mul(i, width)])
            name, body = f"add_tile_{cache.dtype}_{number}", partial(some_queries, number)
            call_once(builder, name, body, first, row_len, cache_data, *located, num_values, to, width)

        in_groups(builder, start, end, call)
        return context.get_dummy_value()

    ints = [types.intp] * 4
    return types.void(weights, *ints, cache, where, types.intp, output, types.intp), generate


def in_groups(
    builder: Any, start: Any, end: Any, call: Callable[[int, Any], None], numbers: Iterable[int] = _STRIPS
) -> None:
    """Generate calls for queries start to end - 1: for as many as possible at a time, then for those that are left.

    numbers: for how many at a time calls are generated, from the most to one."""
    for number in numbers:
        size = start.type(number)
        past = builder.add(start, builder.mul(builder.sdiv(builder.sub(end, start), size), size))
        with cgutils.for_range_slice(builder, start, past, size, start.type) as (i, _):
            call(number, i)
        start = past


def for_strips(builder: Any, start: Any, stop: Any, num_vectors: int, body: Callable[[Any, int], None]) -> None:
    with cgutils.for_range_slice(builder, start, stop, start.type(num_vectors * LANES), start.type) as (d, _):
        body(d, num_vectors)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_tile(typing_context, cache, where, width):
    """Prefetch the TILE keys or values of a tile from memory. cache, where: as for `transpose_tile`."""
    step = _CACHE_LINE // (cache.dtype.bitwidth // 8)

    def body(builder: Any, cache_data: Any, places_data: Any, stride: Any, offset: Any, width: Any) -> None:
        index = width.type
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        with cgutils.for_range(builder, index(TILE)) as loop:
            data = row_at(builder, cache_data, places_data, loop.index, stride, offset)
            with cgutils.for_range_slice(builder, index(0), width, index(step), index) as (d, _):
                line = builder.bitcast(builder.gep(data, [d]), cgutils.voidptr_t)
                builder.call(prefetch, [line, I32(0), I32(2), I32(1)])

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cache_data = array_data(context, builder, signature, args, 0)
        located = unpacked(context, builder, where, args[1])
        call_once(builder, f"prefetch_tile_{cache.dtype}", body, cache_data, *located, args[2])
        return context.get_dummy_value()

    return types.void(cache, where, types.intp), generate


def unpacked(context: Any, builder: Any, kinds: Any, where: Any) -> tuple[Any, Any, Any]:
    """Return a pointer to the place of a tile's first key or value, the stride and the offset."""
    places, first_place, stride, offset = cgutils.unpack_tuple(builder, where, 4)
    data = context.make_array(kinds[0])(context, builder, places).data
    return builder.gep(data, [first_place]), stride, offset


def row_at(builder: Any, cache_data: Any, places_data: Any, i: Any, stride: Any, offset: Any) -> Any:
    """Return a pointer to the key or value in the cache row with the number places[i]."""
    place = builder.load(builder.gep(places_data, [i]))
    return builder.gep(cache_data, [builder.add(builder.mul(place, stride), offset)])
