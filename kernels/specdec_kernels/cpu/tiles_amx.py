"""The inner loops of attention with AMX: what `tiles` does with vectors. `amx` describes the unit.

Up to MOST_TILE_ROWS queries are computed with a tile of keys or values at once, so that they take about as long as one.
A query's result is summed in an order of its own, which no other query changes; it is not the order of `tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec_kernels.cpu.amx import (
    IS_COMPILED,
    MOST_TILE_ROWS,
    NUM_TILES,
    TILE_INPUTS,
    WHOLE_ROWS,
    add_products,
    clear,
    load_tile,
    set_tiles,
    store_tile,
)
from specdec_kernels.cpu.bits import inner
from specdec_kernels.cpu.calls import call_once
from specdec_kernels.cpu.lanes import FLOATS, I32, LANES, array_data, lanes_at, load_floats, spread
from specdec_kernels.cpu.tiles import TILE, for_strips, in_groups, row_at, transposed_square, unpacked

MOST_AT_ONCE = 4
"""Tiles of keys in a call of `dot_tiles`: while one is summed, the next is read."""
_QUERIES, _KEYS = MOST_AT_ONCE, (5, 6, 7)
"""The registers while scores are computed. The first MOST_AT_ONCE are scores, one for each tile of keys."""
_MOST_SUMS = 4
_SHARED, _SHARED_WEIGHTS, _VALUES, _OWN, _OWN_WEIGHTS = tuple(range(_MOST_SUMS)), _MOST_SUMS, 5, (6,), 7
"""The registers while values are summed: sums and weights of many queries, or of a few, and a tile of values."""
_COLUMNS = {1: [[*range(LANES)]], 2: [[8 * k + 4 * v + i for k in range(4) for i in range(4)] for v in range(2)]}
"""{number of vectors that are interleaved at once: the columns of each result}. Two at once take half the time, with
instructions that keep to parts of 128 bits."""
_PLACES = [(*_COLUMNS[2][0], *_COLUMNS[2][1]).index(column) for column in range(2 * LANES)]
"""Where each column then is."""
_ALL_ROWS = (MOST_TILE_ROWS,) * NUM_TILES
_SIZE = 2
"""Bytes of a bfloat16."""


@inner()
def prepare_dots():
    """Prepare this thread for `dot_tiles`."""
    set_tiles(_ALL_ROWS, WHOLE_ROWS)


@inner()
def prepare_sums(num_shared, num_own):
    """Prepare this thread for `add_where_shared` with num_shared queries at once, and for `add_own` with num_own.
    Each is at most MOST_TILE_ROWS."""
    n, m, half = num_shared, num_own, TILE // 2
    set_tiles((n, n, n, n, n, half, m, m), (64, 64, 64, 64, TILE * _SIZE, 64, 64, TILE * _SIZE))


def _dots(num_tiles: int) -> Any:
    def dots(typing_context, queries, num_queries, width, start, end, keys, where, scaling, scores, row_len, column):
        """Compute the scores (dot products times `scaling`) of queries start to end - 1 with the keys of num_tiles
        tiles, TILE keys each. The score of query q and key j is written to scores[q * row_len + column + j].

        queries: bfloat16 [width / 2, num_queries, 2], and memory for 2 * MOST_TILE_ROWS more: what lies there is read
            and has no effect.
        width: a multiple of TILE_INPUTS.
        keys, where: as for `tiles.transpose_tile`, but the TILE keys of a tile follow one another at the stride. Only
            the first one's place is read.
        """

        def body(builder: Any, queries: Any, num_queries: Any, width: Any, number: Any, *args: Any) -> None:
            keys, places, stride, offset, scaling, scores, row_len = args
            index = width.type
            tiles = range(num_tiles)
            data = [row_at(builder, keys, places, index(t * TILE), stride, offset) for t in tiles]
            for t in tiles:
                clear(builder, t)
            with cgutils.for_range_slice(builder, index(0), width, index(TILE_INPUTS), index) as (d, _):
                pairs = builder.gep(queries, [builder.mul(d, num_queries)])
                load_tile(builder, _QUERIES, pairs, builder.mul(num_queries, index(2 * _SIZE)))
                for t in tiles:
                    tile = _KEYS[t % len(_KEYS)]
                    load_tile(builder, tile, builder.gep(data[t], [d]), builder.mul(stride, index(_SIZE)))
                    add_products(builder, t, tile, _QUERIES)
            # [tiles, keys, queries], and what the last vector reads past
            made = cgutils.alloca_once(builder, FLOATS, size=I32(len(tiles) * TILE + 1))
            for t in tiles:
                store_tile(builder, t, builder.gep(made, [I32(t * TILE)]))
            by_key = builder.bitcast(made, ir.FloatType().as_pointer())

            def store(some: int, i: Any) -> None:
                to = builder.gep(scores, [builder.mul(i, row_len)])
                for t in tiles:
                    given = builder.gep(by_key, [builder.add(i, index(t * TILE * LANES))])
                    columns = builder.gep(to, [index(t * TILE)])
                    call_once(
                        builder, f"store_scores_{some}", partial(_store_scores, some), given, scaling, columns, row_len
                    )

            in_groups(builder, index(0), number, store, (16, 8, 4, 2, 1))

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if IS_COMPILED and keys.dtype == types.uint16:
                _, num_queries, width, start, end, _, _, scaling, _, row_len, column = args
                queries_data, keys_data, scores_data = (
                    array_data(context, builder, signature, args, i) for i in (0, 5, 8)
                )
                located = unpacked(context, builder, where, args[6])
                index = start.type

                def call(i: Any, number: Any) -> None:
                    columns = builder.gep(queries_data, [builder.mul(i, index(2))])
                    to = builder.gep(scores_data, [builder.add(builder.mul(i, row_len), column)])
                    given = columns, num_queries, width, number, keys_data, *located, scaling, to, row_len
                    call_once(builder, f"dot_tiles_{num_tiles}", body, *given)

                _in_blocks(builder, start, end, index(MOST_TILE_ROWS), call)
            return context.get_dummy_value()

        ints = [types.intp] * 4
        return types.void(queries, *ints, keys, where, types.float32, scores, *ints[:2]), generate

    return intrinsic(dots)


dot_tile, dot_tiles = _dots(1), _dots(MOST_AT_ONCE)


def _store_scores(number: int, builder: Any, by_key: Any, scaling: Any, scores: Any, row_len: Any) -> None:
    """Scale and store the scores of `number` queries, given float32 [TILE, LANES], a query in each column."""
    index = row_len.type
    square = [load_floats(builder, by_key, index(j * LANES)) for j in range(TILE)]
    scalings = spread(builder, scaling)
    for q, row in enumerate(transposed_square(builder, square)[:number]):
        to = lanes_at(builder, scores, builder.mul(row_len, index(q)))
        builder.store(builder.fmul(row, scalings), to, align=4)


@intrinsic  # type: ignore[untyped-decorator]
def interleave_tile(typing_context, cache, where, width, values, to):
    """Copy the TILE values of a tile to `values` as `add_where_shared` and `add_own` read them, from index `to` on.
    `sort_columns` undoes later what this does to the order of columns.

    cache, where: as for `tiles.transpose_tile`.
    width: a multiple of LANES.
    """

    def body(builder: Any, cache_data: Any, places_data: Any, stride: Any, offset: Any, width: Any, to: Any) -> None:
        index = width.type
        rows = [row_at(builder, cache_data, places_data, index(j), stride, offset) for j in range(TILE)]

        def copy_strip(d: Any, num_vectors: int) -> None:
            kind = ir.VectorType(ir.IntType(16), num_vectors * LANES)
            for pair in range(TILE // 2):
                both = [builder.load(lanes_at(builder, row, d, kind), align=2) for row in rows[2 * pair :][:2]]
                for v, columns in enumerate(_COLUMNS[num_vectors]):
                    order = [column + row * kind.count for column in columns for row in range(2)]
                    vector = builder.shuffle_vector(*both, ir.Constant(ir.VectorType(I32, 2 * LANES), order))
                    at = builder.mul(builder.add(d, index(v * LANES)), index(TILE))
                    to_pair = builder.add(at, index(pair * 2 * LANES))
                    builder.store(vector, lanes_at(builder, to, to_pair, vector.type), align=2)

        whole = builder.sub(width, builder.srem(width, index(2 * LANES)))
        for_strips(builder, index(0), whole, 2, copy_strip)
        for_strips(builder, whole, width, 1, copy_strip)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if IS_COMPILED and cache.dtype == types.uint16:
            cache_data, values_data = (array_data(context, builder, signature, args, i) for i in (0, 3))
            located = unpacked(context, builder, where, args[1])
            data = builder.gep(values_data, [args[4]])
            call_once(builder, "interleave_tile", body, cache_data, *located, args[2], data)
        return context.get_dummy_value()

    return types.void(cache, where, types.intp, values, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def sort_columns(typing_context, numbers, start, width):
    """Undo what `interleave_tile` does to the order of columns, in float32 numbers[start : start + width]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, index = array_data(context, builder, signature, args, 0), args[1].type

        def sort(d: Any, num_vectors: int) -> None:
            places = [lanes_at(builder, data, builder.add(d, index(v * LANES))) for v in range(num_vectors)]
            found = [builder.load(place, align=4) for place in places]
            for v, place in enumerate(places):
                some = ir.Constant(ir.VectorType(I32, LANES), _PLACES[v * LANES : (v + 1) * LANES])
                builder.store(builder.shuffle_vector(*found, some), place, align=4)

        size = builder.sub(args[2], builder.srem(args[2], index(2 * LANES)))
        for_strips(builder, args[1], builder.add(args[1], size), 2, sort)
        return context.get_dummy_value()

    return types.void(numbers, types.intp, types.intp), generate


def _sums(sums: Sequence[int], weights_tile: int) -> Any:
    """sums, weights_tile: the registers."""

    def add(typing_context, weights, row_len, column, start, end, num_at_once, values, num_tiles, output, width):
        """For queries start to end - 1, add the weighted sums of the values of num_tiles tiles to each query's output.
        Values are added in order. Those that a query does not attend to have to have weight 0.

        weights: bfloat16. The weight of value j for query q is weights[q * row_len + column + j].
        num_at_once: as given to `prepare_sums`. The number of queries is rounded up to a multiple of it: memory has to
            be there.
        values: as `interleave_tile` writes them: [num_tiles, width / LANES, TILE / 2, LANES, 2].
        output: float32. The output of query q has `width` elements, from index q * width on.
        """

        def body(
            builder: Any, weights: Any, row_len: Any, values: Any, num_tiles: Any, output: Any, width: Any
        ) -> None:
            index = width.type
            strides = builder.mul(width, index(4)), builder.mul(row_len, index(_SIZE))

            def add_strip(d: Any, num_vectors: int) -> None:
                outputs = [builder.gep(output, [builder.add(d, index(v * LANES))]) for v in range(num_vectors)]
                for tile, data in zip(sums, outputs, strict=False):
                    load_tile(builder, tile, data, strides[0])
                with cgutils.for_range(builder, num_tiles) as loop:
                    place = builder.mul(loop.index, index(TILE))
                    load_tile(builder, weights_tile, builder.gep(weights, [place]), strides[1])
                    first = builder.add(builder.mul(place, width), builder.mul(d, index(TILE)))
                    for v, tile in enumerate(sums[:num_vectors]):
                        load_tile(builder, _VALUES, builder.gep(values, [builder.add(first, index(v * LANES * TILE))]))
                        add_products(builder, tile, weights_tile, _VALUES)
                for tile, data in zip(sums, outputs, strict=False):
                    store_tile(builder, tile, data, strides[0])

            most = len(sums)
            whole = builder.sub(width, builder.srem(width, index(most * LANES)))
            for_strips(builder, index(0), whole, most, add_strip)
            if most > 1:
                for_strips(builder, whole, width, 1, add_strip)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if IS_COMPILED and weights.dtype == types.uint16:
                _, row_len, column, start, end, num_at_once, _, num_tiles, _, width = args
                weights_data, values_data, output_data = (
                    array_data(context, builder, signature, args, i) for i in (0, 6, 8)
                )

                def call(i: Any, number: Any) -> None:
                    rows = builder.gep(weights_data, [builder.add(builder.mul(i, row_len), column)])
                    to = builder.gep(output_data, [builder.mul(i, width)])
                    name = f"add_tiles_{weights_tile}"
                    call_once(builder, name, body, rows, row_len, values_data, num_tiles, to, width)

                _in_blocks(builder, start, end, num_at_once, call)
            return context.get_dummy_value()

        ints = [types.intp] * 5
        return types.void(weights, *ints, values, types.intp, output, types.intp), generate

    return intrinsic(add)


add_where_shared, add_own = _sums(_SHARED, _SHARED_WEIGHTS), _sums(_OWN, _OWN_WEIGHTS)


def _in_blocks(builder: Any, start: Any, end: Any, size: Any, call: Any) -> None:
    """Generate call(first query, number of queries) for the queries start to end - 1, `size` at a time."""
    with cgutils.for_range_slice(builder, start, end, size, start.type) as (i, _):
        left = builder.sub(end, i)
        call(i, builder.select(builder.icmp_signed("<", left, size), left, size))
