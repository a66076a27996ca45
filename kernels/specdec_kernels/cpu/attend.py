"""The compiled part of attention and tree attention: each token attends to its path, the rows of the KV cache that
`paths.py` lists for it."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import prange, typeof, types

from specdec_core import compiled
from specdec_kernels.cpu.bits import array_at, as_stored, inner
from specdec_kernels.cpu.calls import address_of, call_at
from specdec_kernels.cpu.lanes import LANES
from specdec_kernels.cpu.softmax import exp_and_sum
from specdec_kernels.cpu.tiles import DOT_STEP, TILE, add_tile, dot_tile, prefetch_tile, transpose_tile

AHEAD = 4
"""How many tiles ahead memory is prefetched."""
MOST_SCORES = 2**16
"""So many are computed at once: they fit into a processor's own cache together with their weights."""


@compiled(parallel=True)
def attend_in_parts(function, num_parts, like, addresses, strides, shape, chunks, paths, places, *features):
    """Call attend_part for each part. function: its address."""
    for part in prange(num_parts):
        given = np.int64(part), num_parts, like, addresses, strides, shape, chunks, paths, places
        call_at(function, given + features)


@cache
def address_of_attend(dtype: np.dtype) -> int:
    """Return the address of `attend_part` for numbers of a dtype."""
    number, table, like = types.int64, types.int64[:, ::1], typeof(np.empty(0, dtype))
    tuples = [types.UniTuple(number, n) for n in (4, 3, 6)]
    features = types.float64, number, types.float64, types.float32[::1]
    return address_of(attend_part, [number, number, like, *tuples, table, table, types.int64[::1], *features])


@compiled()
def attend_part(
    part,
    num_parts,  # number of parts that the work is cut into, one per thread
    like,  # an array with the dtype of all numbers
    addresses,  # of query [num_tokens, num_heads, key_dim], keys, values and output [num_tokens, num_heads, value_dim]
    strides,  # from token to token in query, keys and values; the rest is contiguous
    shape,  # num_tokens, num_slots, num_heads, num_kv_heads, key_dim, value_dim
    chunks,  # these three: see `lay_out`
    paths,
    places,
    scaling,
    window,  # 0: none
    softcap,  # 0: none
    sinks,  # float32 [num_heads] or [0]: none
):
    num_tokens, num_slots, num_heads, num_kv_heads, key_dim, value_dim = shape
    query = array_at(addresses[0], (num_tokens * strides[0],), like)
    keys = array_at(addresses[1], (num_slots * strides[1],), like), strides[1], key_dim
    values = array_at(addresses[2], (num_slots * strides[2],), like), strides[2], value_dim
    output = array_at(addresses[3], (num_tokens, num_heads, value_dim), like)
    groups = num_heads // num_kv_heads
    start, end = _cut(chunks, num_kv_heads, part, num_parts), _cut(chunks, num_kv_heads, part + 1, num_parts)

    most_queries, most_scores = 0, 0
    for chunk in chunks[start // num_kv_heads : (end - 1) // num_kv_heads + 1]:
        heads_at_once, tokens_at_once = _at_once(chunk, groups, min(end - start, num_kv_heads))
        most_queries = max(most_queries, heads_at_once * tokens_at_once * groups)
        most_scores = max(most_scores, heads_at_once * tokens_at_once * groups * _up(chunk[4], TILE))
    queries = np.zeros(most_queries * _up(key_dim, DOT_STEP), dtype=like.dtype)
    attended = np.empty(most_queries * _up(value_dim, LANES), dtype=np.float32)
    scores = np.empty(most_scores, dtype=np.float32)
    weights = np.empty(most_scores, dtype=like.dtype)
    sums = np.empty(most_queries, dtype=np.float32)
    item = start
    while item < end:
        whole, first_head = chunks[item // num_kv_heads], item % num_kv_heads
        heads_at_once, tokens_at_once = _at_once(whole, groups, min(num_kv_heads - first_head, end - item))
        heads, past = (first_head, heads_at_once, groups), whole[1] + whole[2]
        for token in range(whole[1], past, tokens_at_once):
            chunk = whole[0], token, min(tokens_at_once, past - token), whole[3], whole[4]
            _gather(query, strides[0], key_dim, chunk, heads, queries)
            _score(queries, keys, values, chunk, heads, paths, places, window, np.float32(scaling), scores)
            _weigh(scores, chunk, heads, paths, window, softcap, sinks, weights, sums)
            attended[:] = 0
            _sum_up(weights, values, chunk, heads, paths, places, window, attended)
            _store(attended, sums, chunk, heads, output)
        item += heads_at_once


@inner()
def _up(number, multiple):
    return (number + multiple - 1) // multiple * multiple


@inner()
def _at_once(chunk, groups, num_heads):
    """Return how many KV heads, of num_heads, and how many of a chunk's tokens to compute at once: as many as
    MOST_SCORES allow, and at least one. All tokens, if there are several heads."""
    most = MOST_SCORES // (groups * max(1, _up(chunk[4], TILE)))  # pairs of a head and a token
    return max(1, min(num_heads, most // chunk[2])), max(1, min(chunk[2], most))


@inner()
def _cut(chunks, num_kv_heads, part, num_parts):
    """Return the index of the first work item for thread number `part`. All threads get about equal work.

    A work item is one KV head of one chunk (a group of tokens of a request); items are in the order of chunks. Work is
    estimated: reading a key costs about as much as computing one token's score with it.
    """
    work = 0
    for chunk in chunks:
        work += chunk[4] * (chunk[2] + 1)
    left = work * part / num_parts
    for i in range(len(chunks)):
        work = chunks[i, 4] * (chunks[i, 2] + 1)
        if left < work:
            return i * num_kv_heads + int(left * num_kv_heads / work + 0.5)
        left -= work
    return len(chunks) * num_kv_heads


# A cache is its numbers, the way from token to token, and the width of a head. heads are the first key head, how many
# key heads, and the query heads of each. Queries are counted by key head, then token, then query head of the key head:
# those that read a tile are neighbors.


@inner()
def _gather(query, stride, key_dim, chunk, heads, queries):
    """Copy the queries of a chunk of tokens to queries [num_queries, width]. Here width is key_dim rounded up to whole
    steps of a dot product; columns past key_dim stay 0."""
    first_head, num_heads, groups = heads
    width, i = _up(key_dim, DOT_STEP), 0
    for head in range(first_head, first_head + num_heads):
        for token in range(chunk[1], chunk[1] + chunk[2]):
            for group in range(groups):
                start = token * stride + (head * groups + group) * key_dim
                given, copied = query[start : start + key_dim], queries[i : i + key_dim]
                for d in range(key_dim):
                    copied[d] = given[d]
                i += width


@inner()
def _tiles(chunk, paths, window):
    """Find the tiles that a chunk's tokens attend to. Tile t of a path consists of TILE cache rows, from index t * TILE
    on.

    window: length of the sliding window in tokens; 0 for none.

    Returns four tile indices: first and end of the tiles that any token of the chunk attends to, then first and end of
    the tiles that all its tokens share.
    """
    first, shared = chunk[4] // TILE, 0
    if window == 0:
        first = 0
    else:
        for token in range(chunk[1], chunk[1] + chunk[2]):
            own = max(paths[token, 0] - window, 0) // TILE
            first, shared = min(first, own), max(shared, own)
    return first, _up(chunk[4], TILE) // TILE, shared, chunk[3]


@inner()
def _tile(t, token, chunk, paths, window, shared, num_shared):
    """Locate tile t of a token's path.

    shared, num_shared: first and end of the tiles that all tokens of the chunk share.

    Returns three numbers: how many consecutive tokens, beginning with this one, share the tile; the index at which the
    tile begins in the array `places`; how many of the tile's keys to use (0 or less: none).
    """
    prefix = chunk[0]
    if shared <= t < num_shared:
        return chunk[2], prefix + t * TILE, TILE
    length, num_tiles, tail = paths[token]
    count = min(length - t * TILE, TILE)
    if window > 0 and (t + 1) * TILE <= length - window:
        count = 0
    return 1, (prefix + t * TILE if t < num_tiles else tail + (t - num_tiles) * TILE), count


@inner()
def _score(queries, keys, values, chunk, heads, paths, places, window, scaling, scores):
    """Compute the attention scores of a chunk's queries, and write them to scores [num_queries, keys]. `values` is only
    prefetched from memory, for `_sum_up`."""
    first_head, num_heads, groups = heads
    numbers, stride, key_dim = keys
    width, row_len, num_rows = _up(key_dim, DOT_STEP), _up(chunk[4], TILE), chunk[2]
    first, end, shared, num_shared = _tiles(chunk, paths, window)
    padded, in_order = np.zeros(TILE * width, dtype=numbers.dtype), np.arange(TILE)
    transposed = np.empty(TILE * width, dtype=numbers.dtype)
    for t in range(first, end):
        for h in range(num_heads):
            _prefetch(keys, t + AHEAD, num_shared, chunk, first_head + h, places)
            _prefetch(values, t + AHEAD - num_shared + first, num_shared, chunk, first_head + h, places)
            row = 0
            while row < num_rows:
                together, place, count = _tile(t, chunk[1] + row, chunk, paths, window, shared, num_shared)
                if count > 0:
                    where = places, place, stride, (first_head + h) * key_dim
                    if width == key_dim:
                        transpose_tile(numbers, where, width, transposed)
                    else:
                        _pad(numbers, where, key_dim, width, padded)
                        transpose_tile(padded, (in_order, 0, width, 0), width, transposed)
                    i = (h * num_rows + row) * groups
                    past = i + together * groups
                    dot_tile(queries, width, i, past, transposed, scaling, scores, row_len, t * TILE)
                row += together


@inner()
def _prefetch(cache, t, num_shared, chunk, head, places):
    """Prefetch tile t of a KV head, which is TILE keys or values, from memory. Does nothing for a tile that the tokens
    of the chunk do not all share."""
    numbers, stride, dim = cache
    if 0 <= t < num_shared:
        prefetch_tile(numbers, (places, chunk[0] + t * TILE, stride, head * dim), dim)


@inner()
def _pad(numbers, where, dim, width, padded):
    """Copy the keys or values of a tile to `padded`, whose rows of `width` numbers end with zeros."""
    places, place, stride, offset = where
    for j in range(TILE):
        start, to = places[place + j] * stride + offset, j * width
        for i in range(dim):
            padded[to + i] = numbers[start + i]


@inner()
def _weigh(scores, chunk, heads, paths, window, softcap, sinks, weights, sums):
    """Compute softmax weights of the scores, not normalized yet, and round them to the dtype of weights
    [num_queries, keys]. The sum of each query's weights, by which its result is divided later, is written to sums
    [num_queries]."""
    first_head, num_heads, groups = heads
    row_len, i = _up(chunk[4], TILE), 0
    for head in range(first_head, first_head + num_heads):
        for token in range(chunk[1], chunk[1] + chunk[2]):
            length = paths[token, 0]
            first = max(length - window, 0) if window > 0 else 0
            for group in range(groups):
                sink = sinks[head * groups + group] if len(sinks) else np.float32(-np.inf)
                start, end = i * row_len, i * row_len + _up(length, TILE)
                sums[i] = exp_and_sum(scores[start:end], first, length, softcap, sink, weights[start:end])
                i += 1


@inner()
def _sum_up(weights, values, chunk, heads, paths, places, window, attended):
    """Compute the weighted sum of values for each query of a chunk. Adds it to the query's row of attended
    [num_queries, width]."""
    first_head, num_heads, groups = heads
    numbers, stride, value_dim = values
    width, row_len, num_rows = _up(value_dim, LANES), _up(chunk[4], TILE), chunk[2]
    first, end, shared, num_shared = _tiles(chunk, paths, window)
    padded, in_order = np.zeros(TILE * width, dtype=numbers.dtype), np.arange(TILE)
    for t in range(first, end):
        for h in range(num_heads):
            _prefetch(values, t + AHEAD, num_shared, chunk, first_head + h, places)
            row = 0
            while row < num_rows:
                together, place, count = _tile(t, chunk[1] + row, chunk, paths, window, shared, num_shared)
                if count > 0:
                    cache, where = numbers, (places, place, stride, (first_head + h) * value_dim)
                    if width > value_dim:
                        _pad(numbers, where, value_dim, width, padded)
                        cache, where = padded, (in_order, 0, width, 0)
                    i = (h * num_rows + row) * groups
                    add_tile(weights, row_len, t * TILE, i, i + together * groups, cache, where, count, attended, width)
                row += together


@inner(error_model="numpy")  # a check for division by zero would keep loops from being vectorized
def _store(attended, sums, chunk, heads, output):
    first_head, num_heads, groups = heads
    width, i = _up(output.shape[2], LANES), 0
    for head in range(first_head, first_head + num_heads):
        for token in range(chunk[1], chunk[1] + chunk[2]):
            for group in range(groups):
                weighted, stored = attended[i * width : (i + 1) * width], output[token, head * groups + group]
                for d in range(len(stored)):
                    stored[d] = as_stored(output, weighted[d] / sums[i])
                i += 1
