"""The scores and sums of a chunk with AMX: what `_score` and `_sum_up` of `attend` do with vectors, in other orders."""

from __future__ import annotations

from specdec_kernels.cpu.amx import MOST_TILE_ROWS
from specdec_kernels.cpu.bits import inner
from specdec_kernels.cpu.chunks import RUN, copy_padded, find_tiles, locate, padded_number, rounded_up
from specdec_kernels.cpu.lanes import LANES
from specdec_kernels.cpu.tiles import DOT_STEP, TILE
from specdec_kernels.cpu.tiles_amx import (
    MOST_AT_ONCE,
    add_own,
    add_where_shared,
    dot_tile,
    dot_tiles,
    interleave_tile,
    prepare_dots,
    prepare_sums,
    sort_columns,
)


@inner(_nrt=False)
def score(queries, keys, values, chunk, heads, paths, places, window, scaling, scratch, scores):
    """Compute a chunk's attention scores, several tiles at a time where all tokens share them. Nothing is prefetched
    here: it gained nothing on a processor with AMX, whose own prefetching is enough."""
    first_head, num_heads, groups = heads
    numbers, stride, key_dim = keys
    width, row_len, num_rows = rounded_up(key_dim, DOT_STEP), rounded_up(chunk[4], TILE), chunk[2]
    first, end, shared, num_shared = find_tiles(chunk, paths, window)
    of_head = padded_number(num_rows * groups)
    columns = queries, num_heads * of_head, width
    _, padded, in_order = scratch
    prepare_dots()
    t = first
    while t < end:
        num_tiles = MOST_AT_ONCE if shared <= t <= num_shared - MOST_AT_ONCE else 1
        for h in range(num_heads):
            row = 0
            while row < num_rows:
                together, place, count = locate(t, chunk[1] + row, chunk, paths, window, shared, num_shared)
                if count > 0:
                    i, offset = h * of_head + row * groups, (first_head + h) * key_dim
                    chosen, to = (*columns, i, i + together * groups), (scaling, scores, row_len)
                    are_runs = width == key_dim
                    for number in range(num_tiles):
                        are_runs &= _is_run(places, place + number * TILE, count, stride, numbers)
                    if are_runs and num_tiles == MOST_AT_ONCE:
                        dot_tiles(*chosen, numbers, (places, place, stride, offset), *to, t * TILE)
                    else:
                        for number in range(num_tiles):
                            cache, where = numbers, (places, place + number * TILE, stride, offset)
                            if not are_runs:
                                copy_padded(numbers, where, key_dim, width, padded)
                                cache, where = padded, (in_order, 0, width, 0)
                            dot_tile(*chosen, cache, where, *to, (t + number) * TILE)
                row += together
        t += num_tiles


@inner(_nrt=False)
def _is_run(places, place, count, stride, numbers):
    """Return whether a tile's first `count` rows follow one another in the cache, and as many as a tile has are there:
    the others' scores are overwritten."""
    first, differences = places[place], 0
    for j in range(count):
        differences |= places[place + j] - first - j
    return differences == 0 and (first + TILE) * stride <= len(numbers)


@inner(_nrt=False)
def sum_up(weights, values, chunk, heads, paths, places, window, scratch, attended):
    """Compute the weighted sums of values, a run of tiles at a time where all tokens share them."""
    first_head, num_heads, groups = heads
    numbers, stride, value_dim = values
    width, row_len, num_rows = rounded_up(value_dim, LANES), rounded_up(chunk[4], TILE), chunk[2]
    first, end, shared, num_shared = find_tiles(chunk, paths, window)
    of_head, num_own = padded_number(num_rows * groups), groups
    while num_own > MOST_TILE_ROWS or groups % num_own > 0:
        num_own -= 1
    most = min(of_head, MOST_TILE_ROWS)
    prepare_sums(most, num_own)
    copied, padded, in_order = scratch
    t = first
    while t < end:
        num_tiles = min(RUN, num_shared - t) if shared <= t < num_shared else 1
        for h in range(num_heads):
            row = 0
            while row < num_rows:
                together, place, count = locate(t, chunk[1] + row, chunk, paths, window, shared, num_shared)
                if count > 0:
                    for number in range(num_tiles):
                        cache, where = numbers, (places, place + number * TILE, stride, (first_head + h) * value_dim)
                        if width > value_dim:
                            copy_padded(numbers, where, value_dim, width, padded)
                            cache, where = padded, (in_order, 0, width, 0)
                        interleave_tile(cache, where, width, copied, number * TILE * width)
                    i = h * of_head + row * groups
                    chosen, to = (row_len, t * TILE, i, i + together * groups), (copied, num_tiles, attended, width)
                    if together == num_rows:
                        add_where_shared(weights, *chosen, most, *to)
                    else:
                        add_own(weights, *chosen, num_own, *to)
                row += together
        t += num_tiles
    for i in range(num_heads * of_head):
        sort_columns(attended, i * width, width)
