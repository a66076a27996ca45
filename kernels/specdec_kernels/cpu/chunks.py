"""What attention computes together: a chunk, which is a group of tokens of a request, and the tiles of keys and values
that its tokens attend to.

Names in the code that attends to a chunk: a cache is its numbers, the way from token to token, and the width of a head.
`heads` are the first key head, how many key heads, and the query heads of each. Queries are counted by key head, then
token, then query head of the key head: those that read a tile are neighbors. Each key head has `padded_number` places
for them. `scratch` is memory for RUN tiles, for one tile, and the numbers 0 to TILE - 1.

Nothing of it allocates, so numba need not count references to arrays (_nrt=False). Its counters are atomic, and with
several for each tile they took a large part of the time.
"""

from __future__ import annotations

from specdec_kernels.cpu.amx import MOST_TILE_ROWS
from specdec_kernels.cpu.bits import inner
from specdec_kernels.cpu.tiles import TILE

RUN = 8
"""For so many tiles AMX keeps its sums: their values fit into a processor's first cache."""


@inner(_nrt=False)
def rounded_up(number, multiple):
    return (number + multiple - 1) // multiple * multiple


@inner(_nrt=False)
def padded_number(num_queries):
    """Return how many queries of a KV head there is memory for: AMX computes MOST_TILE_ROWS, or all of fewer."""
    return num_queries if num_queries <= MOST_TILE_ROWS else rounded_up(num_queries, MOST_TILE_ROWS)


@inner(_nrt=False)
def find_tiles(chunk, paths, window):
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
    return first, rounded_up(chunk[4], TILE) // TILE, shared, chunk[3]


@inner(_nrt=False)
def locate(t, token, chunk, paths, window, shared, num_shared):
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


@inner(_nrt=False)
def copy_padded(numbers, where, dim, width, padded):
    """Copy the keys or values of a tile to `padded`, whose rows of `width` numbers end with zeros."""
    places, place, stride, offset = where
    for j in range(TILE):
        start, to = places[place + j] * stride + offset, j * width
        for i in range(dim):
            padded[to + i] = numbers[start + i]
        for i in range(dim, width):
            padded[to + i] = 0
