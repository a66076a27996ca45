"""The attention mask as paths: the path of a token lists the rows of the KV cache that the token attends to, in order.
The paths of a forward pass are computed once for all layers.

A token's path is its prefix (the first slots of its request), then its ancestors in the draft tree, then the token
itself. Paths are cut into tiles of TILE rows. A request's tokens share the tiles that lie within their prefixes; the
rest of each path is the token's tail.
"""

from __future__ import annotations

import numpy as np

from specdec_core import compiled
from specdec_kernels.cpu.bits import inner
from specdec_kernels.cpu.tiles import TILE

MAX_ROWS = 16
"""Most tokens of a request that share the work of reading keys and values."""


@compiled()
def lay_out(
    lengths,  # int64 [batch]   each request's number of tokens
    prefix_lens,  # int64 [num_tokens]
    more_slots,  # int64 [num_tokens, n] or [1, 0]   from the token itself up to its root's slot, which repeats
    block_tables,  # int64 [batch, max_blocks]
    block_size,
):
    """Compute the paths of all tokens. Returns the arrays chunks, paths and places, and the sum of the paths' lengths.

    chunks: int64 [num_chunks, 5]. A chunk is a group of up to MAX_ROWS tokens of a request. Columns: the index in
        `places` at which the request's prefix begins, the index of the first token, the number of tokens, the number of
        tiles within the prefixes of all its tokens, the length of its longest path.
    paths: int64 [num_tokens, 3]. Columns: the length of the token's path, the number of tiles within its prefix, the
        index in `places` at which its tail begins.
    places: int64 [...], row numbers in the KV cache. A tail repeats its last row until its last tile is full.
    """
    num_chunks, num_places, num_pairs = 0, 0, 0
    paths = np.zeros((len(prefix_lens), 3), dtype=np.int64)
    prefixes = np.zeros((len(lengths), 2), dtype=np.int64)  # tiles within any prefix, where they begin in places
    end = 0
    for request in range(len(lengths)):
        start, end = end, end + lengths[request]
        num_chunks += (end - start + MAX_ROWS - 1) // MAX_ROWS
        for token in range(start, end):
            num_tiles = prefix_lens[token] // TILE
            paths[token, 0] = prefix_lens[token] + _num_more(prefix_lens[token], more_slots, token % len(more_slots))
            paths[token, 1], paths[token, 2] = num_tiles, num_places
            num_pairs += paths[token, 0]
            num_places += _rounded_up(paths[token, 0] - num_tiles * TILE)
            prefixes[request, 0] = max(prefixes[request, 0], num_tiles)
        prefixes[request, 1] = num_places
        num_places += prefixes[request, 0] * TILE
    places = np.empty(num_places, dtype=np.int64)
    chunks = np.empty((num_chunks, 5), dtype=np.int64)
    chunk = 0
    end = 0
    for request in range(len(lengths)):
        start, end = end, end + lengths[request]
        _add_slots(places, prefixes[request, 1], 0, prefixes[request, 0] * TILE, block_tables, request, block_size)
        for first in range(start, end, MAX_ROWS):
            past = min(first + MAX_ROWS, end)
            shared, longest = prefixes[request, 0], 0
            for token in range(first, past):
                _add_tail(places, paths, prefix_lens[token], more_slots, token, block_tables, request, block_size)
                shared, longest = min(shared, paths[token, 1]), max(longest, paths[token, 0])
            chunks[chunk, 0], chunks[chunk, 1], chunks[chunk, 2] = prefixes[request, 1], first, past - first
            chunks[chunk, 3], chunks[chunk, 4] = shared, longest
            chunk += 1
    return chunks, paths, places, num_pairs


@inner()
def _rounded_up(num_tokens):
    return (num_tokens + TILE - 1) // TILE * TILE


@inner()
def _num_more(prefix_len, more_slots, row):
    """Return how many slots of more_slots[row] are not in the token's prefix. The row is padded with copies of its last
    slot, which are not counted."""
    num_more, last = 0, np.int64(-1)
    for i in range(more_slots.shape[1]):
        slot = more_slots[row, i]
        num_more += slot >= prefix_len and slot != last
        last = slot
    return num_more


@inner()
def _add_slots(places, start, first, end, block_tables, request, block_size):
    """Write the numbers of the cache rows that hold a request's slots first to end - 1 to `places`, from index `start`
    on."""
    slot = first
    while slot < end:
        past = min((slot // block_size + 1) * block_size, end)
        place = block_tables[request, slot // block_size] * block_size + slot % block_size
        for i in range(past - slot):
            places[start + slot - first + i] = place + i
        slot = past


@inner()
def _add_tail(places, paths, prefix_len, more_slots, token, block_tables, request, block_size):
    first, start = paths[token, 1] * TILE, paths[token, 2]
    length = paths[token, 0] - first
    _add_slots(places, start, first, prefix_len, block_tables, request, block_size)
    i, last, row = start + length - 1, np.int64(-1), token % len(more_slots)
    for column in range(more_slots.shape[1]):
        slot = more_slots[row, column]
        if slot >= prefix_len and slot != last:
            _add_slots(places, i, slot, slot + 1, block_tables, request, block_size)
            i -= 1
        last = slot
    for i in range(start + length, start + _rounded_up(length)):
        places[i] = places[start + length - 1]
