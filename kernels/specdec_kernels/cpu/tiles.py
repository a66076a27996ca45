"""The two inner loops of attention: scores, and weighted sums of values. Each call computes one tile, up to TILE tokens
of the KV cache, with vectors of LANES float32.

Several queries share a tile: it is loaded once for all of them, and converted once if it is bfloat16. A query's result
does not depend on the number of queries: the operations and their order are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec_kernels.cpu.lanes import (
    I32,
    INTS,
    LANES,
    is_supported,
    lanes_at,
    load_floats,
    load_pairs,
    loader,
    multiply_add as multiply_add_lanes,
    multiply_add_pairs,
    spread,
    variable,
)

TILE = 16
DOT_STEP = 2 * LANES
"""Numbers that one step of a dot product takes at most, a pair of bfloat16 in each lane."""

_KEYS = {1: 8, 2: 8, 3: 8, 4: 4}
"""{number of queries: keys per step}, so that the sums of all pairs stay in registers."""
_STRIP = {1: 4, 2: 4, 3: 4, 4: 4, 8: 2}
"""{number of queries: vectors of a value summed at a time}, for the same reason."""

_CACHE_LINE = 64


def array_data(context: Any, builder: Any, signature: Any, args: Any, i: int) -> Any:
    """Return an LLVM pointer to the elements of argument number i, which is an array."""
    return context.make_array(signature.args[i])(context, builder, args[i]).data


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dot_tile(
    typing_context,
    queries,
    first_query,
    width,
    cache,
    places,
    first_place,
    stride,
    offset,
    scaling,
    scores,
    first,
    row_len,
    n,
):
    """Compute the scores (dot products times `scaling`) of n queries with the TILE keys of a tile. The score of query q
    and key j is written to scores[first + q * row_len + j].

    queries: as the cache. Query q has `width` elements, from index first_query + q * width on.
    cache: float32 or bfloat16. Key j has `width` elements, from index places[first_place + j] * stride + offset on.
    width: a multiple of DOT_STEP.
    n: a literal from 1 to 4.

    All arrays are flat and contiguous.
    """
    num_queries, num_keys = n.literal_value, _KEYS[n.literal_value]
    has_pairs = cache.dtype == types.uint16 and is_supported(torch.bfloat16)
    step, load = (2 * LANES, load_pairs) if has_pairs else (LANES, loader(cache))
    add_product = multiply_add_pairs if has_pairs else multiply_add_lanes

    def body(builder: Any, query_data: Any, width: Any, cache_data: Any, *args: Any) -> None:
        places_data, stride, offset, scaling, scores_data, row_len = args
        index = width.type
        queries = [builder.gep(query_data, [builder.mul(width, index(q))]) for q in range(num_queries)]

        def some_keys(start: int) -> list[Any]:
            keys = [
                _at(builder, cache_data, places_data, index(j), stride, offset) for j in range(start, start + num_keys)
            ]
            sums = [[variable(builder) for _ in keys] for _ in queries]
            with cgutils.for_range_slice(builder, index(0), width, index(step), index) as (d, _):
                factors = [load(builder, each, d) for each in queries]
                for j, each in enumerate(keys):
                    key = load(builder, each, d)
                    for factor, query_sums in zip(factors, sums, strict=True):
                        total = builder.load(query_sums[j])
                        builder.store(add_product(builder, factor, key, total), query_sums[j])
            return [_sum_lanes(builder, [builder.load(each) for each in query_sums], 1) for query_sums in sums]

        def all_keys(start: int, count: int) -> list[Any]:
            if count == num_keys:
                return some_keys(start)
            halves = all_keys(start, count // 2), all_keys(start + count // 2, count // 2)
            return [_sum_lanes(builder, pair, count // 2) for pair in zip(*halves, strict=True)]

        factor = spread(builder, scaling)
        for q, found in enumerate(all_keys(0, TILE)):
            found = builder.fmul(found, factor)
            builder.store(found, lanes_at(builder, scores_data, builder.mul(row_len, index(q))), align=4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        query_data, cache_data, places_data, scores_data = (
            builder.gep(array_data(context, builder, signature, args, i), [start])
            for i, start in ((0, args[1]), (3, args[2].type(0)), (4, args[5]), (9, args[10]))
        )
        name = f"dot_tile_{cache.dtype}_{num_queries}"
        call_once(builder, name, body, query_data, args[2], cache_data, places_data, *args[6:9], scores_data, args[11])
        return context.get_dummy_value()

    ints = [types.intp] * 3
    return types.void(queries, *ints[:2], cache, places, *ints, types.float32, scores, *ints[:2], n), generate


def _sum_lanes(builder: Any, vectors: Sequence[Any], distance: int) -> Any:
    """Add up lanes within vectors, and merge the vectors into one by a butterfly reduction.

    For LANES vectors and distance 1, lane j of the result is the sum of all lanes of vector j.

    distance: distance between the lanes that the first round adds. Each further round doubles it.
    """
    while len(vectors) > 1:
        own = [i + (LANES if i & distance else 0) for i in range(LANES)]
        other = [i ^ distance for i in own]
        own, other = (ir.Constant(INTS, each) for each in (own, other))
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, own), builder.shuffle_vector(a, b, other))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        distance *= 2
    return vectors[0]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_tile(
    typing_context,
    weights,
    first,
    row_len,
    cache,
    places,
    first_place,
    stride,
    offset,
    num_values,
    output,
    start,
    width,
    n,
):
    """For n queries, add the weighted sum of a tile's first num_values values to each query's output. Values are added
    in order.

    weights: float32. The weight of value j for query q is weights[first + q * row_len + j].
    cache: float32 or bfloat16. Value j has `width` elements, from index places[first_place + j] * stride + offset on.
    output: float32. The output of query q has `width` elements, from index start + q * width on.
    n: a literal, 1 to 4 or 8.
    """
    num_queries, load = n.literal_value, loader(cache)

    def body(builder: Any, weights_data: Any, row_len: Any, cache_data: Any, *args: Any) -> None:
        places_data, stride, offset, num_values, output_data, width = args
        index = width.type
        rows, outputs = (
            [builder.gep(data, [builder.mul(length, index(q))]) for q in range(num_queries)]
            for data, length in ((weights_data, row_len), (output_data, width))
        )

        def add_strip(d: Any, num_vectors: int) -> None:
            steps = [builder.add(d, index(i * LANES)) for i in range(num_vectors)]
            totals = [[variable(builder, load_floats(builder, each, step)) for step in steps] for each in outputs]
            with cgutils.for_range(builder, num_values) as loop:
                data = _at(builder, cache_data, places_data, loop.index, stride, offset)
                values = [load(builder, data, step) for step in steps]
                for row, row_totals in zip(rows, totals, strict=True):
                    weight = spread(builder, builder.load(builder.gep(row, [loop.index])))
                    for value, total in zip(values, row_totals, strict=True):
                        builder.store(multiply_add_lanes(builder, weight, value, builder.load(total)), total)
            for each, row_totals in zip(outputs, totals, strict=True):
                for step, total in zip(steps, row_totals, strict=True):
                    builder.store(builder.load(total), lanes_at(builder, each, step), align=4)

        strip = _STRIP[num_queries]
        whole = builder.sub(width, builder.srem(width, index(strip * LANES)))
        _for_strips(builder, index(0), whole, strip, add_strip)
        _for_strips(builder, whole, width, 1, add_strip)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights_data, cache_data, places_data, output_data = (
            builder.gep(array_data(context, builder, signature, args, i), [start])
            for i, start in ((0, args[1]), (3, args[2].type(0)), (4, args[5]), (9, args[10]))
        )
        name = f"add_tile_{cache.dtype}_{num_queries}"
        call_once(
            builder, name, body, weights_data, args[2], cache_data, places_data, *args[6:9], output_data, args[11]
        )
        return context.get_dummy_value()

    ints = [types.intp] * 4
    return types.void(weights, *ints[:2], cache, places, *ints, output, *ints[:2], n), generate


@intrinsic  # type: ignore[untyped-decorator]
def sum_of(typing_context, numbers, start, end):
    """Return the sum of the float32 numbers[start:end]; end - start is a multiple of LANES. A vector of LANES partial
    sums is computed first, then its lanes are added up."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, total = array_data(context, builder, signature, args, 0), variable(builder)
        step = args[1].type(LANES)
        with cgutils.for_range_slice(builder, args[1], args[2], step, args[1].type) as (i, _):
            builder.store(builder.fadd(builder.load(total), load_floats(builder, data, i)), total)
        summed = _sum_lanes(builder, [builder.load(total)] * LANES, 1)
        return builder.extract_element(summed, I32(0))

    return types.float32(numbers, types.intp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def highest_of(typing_context, numbers, start, end, least):
    """Return the largest of `least` and the float32 numbers[start:end]; end - start is a multiple of LANES. NaN is
    ignored."""

    def larger(builder: Any, a: Any, b: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, highest = array_data(context, builder, signature, args, 0), variable(builder, spread(builder, args[3]))
        step = args[1].type(LANES)
        with cgutils.for_range_slice(builder, args[1], args[2], step, args[1].type) as (i, _):
            builder.store(larger(builder, load_floats(builder, data, i), builder.load(highest)), highest)
        lanes = builder.load(highest)
        for distance in (8, 4, 2, 1):
            lanes = larger(builder, lanes, builder.shuffle_vector(lanes, lanes, _neighbors(distance)))
        return builder.extract_element(lanes, I32(0))

    return types.float32(numbers, types.intp, types.intp, types.float32), generate


def _neighbors(distance: int) -> Any:
    return ir.Constant(INTS, [i ^ distance for i in range(LANES)])


@intrinsic  # type: ignore[untyped-decorator]
def sum_of_squares(typing_context, numbers, start, end):
    """Return the sum of the squares of numbers[start:end], float32 or bfloat16, in the order of `sum_of`."""
    load_lanes = loader(numbers)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, total = array_data(context, builder, signature, args, 0), variable(builder)
        step = args[1].type(LANES)
        with cgutils.for_range_slice(builder, args[1], args[2], step, args[1].type) as (i, _):
            lanes = load_lanes(builder, data, i)
            builder.store(multiply_add_lanes(builder, lanes, lanes, builder.load(total)), total)
        summed = _sum_lanes(builder, [builder.load(total)] * LANES, 1)
        return builder.extract_element(summed, I32(0))

    return types.float32(numbers, types.intp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(typing_context, a, b, c):
    """Return a * b + c of three float32, rounded only once (a fused multiply-add)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return multiply_add_lanes(builder, *args)

    return types.float32(*[types.float32] * 3), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_tile(typing_context, cache, places, first_place, stride, offset, width):
    """Prefetch the TILE keys or values of a tile from memory. Key or value j has `width` elements, from index
    places[first_place + j] * stride + offset of `cache` on."""
    step = _CACHE_LINE // (cache.dtype.bitwidth // 8)

    def body(builder: Any, cache_data: Any, places_data: Any, stride: Any, offset: Any, width: Any) -> None:
        index = width.type
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        with cgutils.for_range(builder, index(TILE)) as loop:
            data = _at(builder, cache_data, places_data, loop.index, stride, offset)
            with cgutils.for_range_slice(builder, index(0), width, index(step), index) as (d, _):
                line = builder.bitcast(builder.gep(data, [d]), cgutils.voidptr_t)
                builder.call(prefetch, [line, I32(0), I32(2), I32(1)])

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cache_data, places_data = (array_data(context, builder, signature, args, i) for i in (0, 1))
        places_data = builder.gep(places_data, [args[2]])
        call_once(builder, f"prefetch_tile_{cache.dtype}", body, cache_data, places_data, *args[3:])
        return context.get_dummy_value()

    return types.void(cache, places, *[types.intp] * 4), generate


def _for_strips(builder: Any, start: Any, stop: Any, num_vectors: int, body: Callable[[Any, int], None]) -> None:
    with cgutils.for_range_slice(builder, start, stop, start.type(num_vectors * LANES), start.type) as (d, _):
        body(d, num_vectors)


def call_once(builder: Any, name: str, body: Callable[..., None], *args: Any) -> None:
    """Generate a call of a function named `name`, whose code `body` generates. The function is not inlined, so that it
    is compiled only once."""
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in args])
    function = cgutils.get_or_insert_function(builder.module, kind, f"specdec_{name}")
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        own_builder = ir.IRBuilder(function.append_basic_block())
        body(own_builder, *function.args)
        own_builder.ret_void()
    builder.call(function, args)


def _at(builder: Any, cache_data: Any, places_data: Any, i: Any, stride: Any, offset: Any) -> Any:
    """Return a pointer to the key or value in the cache row with the number places[i]."""
    place = builder.load(builder.gep(places_data, [i]))
    return builder.gep(cache_data, [builder.add(builder.mul(place, stride), offset)])
