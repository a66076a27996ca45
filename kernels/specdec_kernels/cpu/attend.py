"""The compiled part of attention and tree attention: each token attends to its path, the rows of the KV cache that
`paths.py` lists for it."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import prange, typeof, types

from specdec_core import compiled
from specdec_kernels.cpu import attend_amx
from specdec_kernels.cpu.amx import MOST_TILE_ROWS, release_tiles
from specdec_kernels.cpu.bits import array_at, as_stored, inner
from specdec_kernels.cpu.calls import address_of, call_at
from specdec_kernels.cpu.chunks import RUN, copy_padded, find_tiles, locate, padded_number, rounded_up
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
    features = number, types.float64, number, types.float64, types.float32[::1]
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
    uses_amx,  # 0: no
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
        num_queries = heads_at_once * padded_number(tokens_at_once * groups)
        most_queries = max(most_queries, num_queries)
        most_scores = max(most_scores, num_queries * rounded_up(chunk[4], TILE))
    queries = np.empty(most_queries * rounded_up(key_dim, DOT_STEP) + 2 * MOST_TILE_ROWS, dtype=like.dtype)
    attended = np.empty(most_queries * rounded_up(value_dim, LANES), dtype=np.float32)
    scores = np.empty(most_scores, dtype=np.float32)
    weights = np.empty(most_scores, dtype=like.dtype)
    sums = np.empty(most_queries, dtype=np.float32)
    tile_size = TILE * max(rounded_up(key_dim, DOT_STEP), rounded_up(value_dim, LANES))
    scratch = np.empty(RUN * tile_size, dtype=like.dtype), np.empty(tile_size, dtype=like.dtype), np.arange(TILE)
    item = start
    while item < end:
        whole, first_head = chunks[item // num_kv_heads], item % num_kv_heads
        heads_at_once, tokens_at_once = _at_once(whole, groups, min(num_kv_heads - first_head, end - item))
        heads, past = (first_head, heads_at_once, groups), whole[1] + whole[2]
        for token in range(whole[1], past, tokens_at_once):
            chunk = whole[0], token, min(tokens_at_once, past - token), whole[3], whole[4]
            seen = chunk, heads, paths, places, window
            _gather(query, strides[0], key_dim, chunk, heads, uses_amx, queries)
            if uses_amx:
                attend_amx.score(queries, keys, values, *seen, np.float32(scaling), scratch, scores)
            else:
                _score(queries, keys, values, *seen, np.float32(scaling), scratch, scores)
            _weigh(scores, chunk, heads, paths, window, softcap, sinks, weights, sums)
            attended[:] = 0
            if uses_amx:
                attend_amx.sum_up(weights, values, *seen, scratch, attended)
            else:
                _sum_up(weights, values, *seen, scratch, attended)
            _store(attended, sums, chunk, heads, output)
        item += heads_at_once
    if uses_amx:
        release_tiles()


@inner()
def _at_once(chunk, groups, num_heads):
    """Return how many KV heads, of num_heads, and how many of a chunk's tokens to compute at once: as many as
    MOST_SCORES allow, and at least one. All tokens, if there are several heads."""
    most = MOST_SCORES // (groups * max(1, rounded_up(chunk[4], TILE)))  # pairs of a head and a token
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


@inner(_nrt=False)
def _gather(query, stride, key_dim, chunk, heads, uses_amx, queries):
    """Copy the queries of a chunk of tokens to queries [num_queries, width], or with AMX [width / 2, num_queries, 2].
    Here width is key_dim rounded up to whole steps of a dot product; what is past key_dim is 0."""
    first_head, num_heads, groups = heads
    width, of_head = rounded_up(key_dim, DOT_STEP), padded_number(chunk[2] * groups)
    for head in range(num_heads):
        for token in range(chunk[2]):
            for group in range(groups):
                start = (chunk[1] + token) * stride + ((first_head + head) * groups + group) * key_dim
                given, i = query[start : start + key_dim], head * of_head + token * groups + group
                if uses_amx:
                    place = 2 * i
                    for d in range(0, key_dim - 1, 2):
                        queries[place], queries[place + 1] = given[d], given[d + 1]
                        place += 2 * num_heads * of_head
                    for d in range(key_dim // 2 * 2, width, 2):
                        queries[place], queries[place + 1] = given[d] if d < key_dim else 0, 0
                        place += 2 * num_heads * of_head
                else:
                    copied = queries[i * width : (i + 1) * width]
                    for d in range(key_dim):
                        copied[d] = given[d]
                    copied[key_dim:] = 0


@inner(_nrt=False)
def _score(queries, keys, values, chunk, heads, paths, places, window, scaling, scratch, scores):
    """Compute the attention scores of a chunk's queries, and write them to scores [num_queries, keys]. `values` is only
    prefetched from memory, for the sums."""
    first_head, num_heads, groups = heads
    numbers, stride, key_dim = keys
    width, row_len, num_rows = rounded_up(key_dim, DOT_STEP), rounded_up(chunk[4], TILE), chunk[2]
    first, end, shared, num_shared = find_tiles(chunk, paths, window)
    of_head = padded_number(num_rows * groups)
    transposed, padded, in_order = scratch
    for t in range(first, end):
        for h in range(num_heads):
            _prefetch(keys, t + AHEAD, num_shared, chunk, first_head + h, places)
            _prefetch(values, t + AHEAD - num_shared + first, num_shared, chunk, first_head + h, places)
            row = 0
            while row < num_rows:
                together, place, count = locate(t, chunk[1] + row, chunk, paths, window, shared, num_shared)
                if count > 0:
                    cache, where = numbers, (places, place, stride, (first_head + h) * key_dim)
                    if width > key_dim:
                        copy_padded(numbers, where, key_dim, width, padded)
                        cache, where = padded, (in_order, 0, width, 0)
                    transpose_tile(cache, where, width, transposed)
                    i = h * of_head + row * groups
                    past = i + together * groups
                    dot_tile(queries, width, i, past, transposed, scaling, scores, row_len, t * TILE)
                row += together


@inner(_nrt=False)
def _prefetch(cache, t, num_shared, chunk, head, places):
    """Prefetch tile t of a KV head, which is TILE keys or values, from memory. Does nothing for a tile that the tokens
    of the chunk do not all share."""
    numbers, stride, dim = cache
    if 0 <= t < num_shared:
        prefetch_tile(numbers, (places, chunk[0] + t * TILE, stride, head * dim), dim)


@inner(_nrt=False)
def _weigh(scores, chunk, heads, paths, window, softcap, sinks, weights, sums):
    """Compute softmax weights of the scores, not normalized yet, and round them to the dtype of weights
    [num_queries, keys]. The sum of each query's weights, by which its result is divided later, is written to sums
    [num_queries]."""
    first_head, num_heads, groups = heads
    row_len, of_head = rounded_up(chunk[4], TILE), padded_number(chunk[2] * groups)
    for head in range(first_head, first_head + num_heads):
        i = (head - first_head) * of_head
        for token in range(chunk[1], chunk[1] + chunk[2]):
            length = paths[token, 0]
            first = max(length - window, 0) if window > 0 else 0
            for group in range(groups):
                sink = sinks[head * groups + group] if len(sinks) else np.float32(-np.inf)
                start, end = i * row_len, i * row_len + rounded_up(length, TILE)
                sums[i] = exp_and_sum(scores[start:end], first, length, softcap, sink, weights[start:end])
                i += 1


@inner(_nrt=False)
def _sum_up(weights, values, chunk, heads, paths, places, window, scratch, attended):
    """Compute the weighted sum of values for each query of a chunk. Adds it to the query's row of attended
    [num_queries, width]."""
    first_head, num_heads, groups = heads
    numbers, stride, value_dim = values
    width, row_len, num_rows = rounded_up(value_dim, LANES), rounded_up(chunk[4], TILE), chunk[2]
    first, end, shared, num_shared = find_tiles(chunk, paths, window)
    of_head = padded_number(num_rows * groups)
    _, padded, in_order = scratch
    for t in range(first, end):
        for h in range(num_heads):
            _prefetch(values, t + AHEAD, num_shared, chunk, first_head + h, places)
            row = 0
            while row < num_rows:
                together, place, count = locate(t, chunk[1] + row, chunk, paths, window, shared, num_shared)
                if count > 0:
                    cache, where = numbers, (places, place, stride, (first_head + h) * value_dim)
                    if width > value_dim:
                        copy_padded(numbers, where, value_dim, width, padded)
                        cache, where = padded, (in_order, 0, width, 0)
                    i = h * of_head + row * groups
                    add_tile(weights, row_len, t * TILE, i, i + together * groups, cache, where, count, attended, width)
                row += together


@inner(error_model="numpy", _nrt=False)  # a check for division by zero would keep loops from being vectorized
def _store(attended, sums, chunk, heads, output):
    first_head, num_heads, groups = heads
    width, of_head = rounded_up(output.shape[2], LANES), padded_number(chunk[2] * groups)
    for head in range(first_head, first_head + num_heads):
        i = (head - first_head) * of_head
        for token in range(chunk[1], chunk[1] + chunk[2]):
            for group in range(groups):
                weighted, stored = attended[i * width : (i + 1) * width], output[token, head * groups + group]
                for d in range(len(stored)):
                    stored[d] = as_stored(output, weighted[d] / sums[i])
                i += 1
