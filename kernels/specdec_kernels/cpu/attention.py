"""Attention over paged keys and values on a CPU, read where they lie: nothing is gathered, padded or masked.

A query's result depends on the query, on the keys that it sees and on their order along its path, and on nothing else
in the batch: not on the number of rows, nor on the slots in which the keys lie. So a node of a tree, however it
branches, gets to the last bit what plain decoding computes for the same tokens.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from numba import njit, prange

from specdec_core import ops
from specdec_core.ops.attention import attend
from specdec_core.ops.attention_plan import SHORT, AttentionPlan
from specdec_kernels.cpu.bits import DTYPES, FAST, as_array, as_stored, bits_to_float, compiled, load
from specdec_kernels.cpu.threads import in_parallel
from specdec_kernels.cpu.tiles import LANES, TILE, add_tile, dot_tile

MAX_ROWS = 8
"""Most tokens of a request that share the work of reading keys and values."""

_LOG2_E = np.float32(1.4426950408889634)
_LOWEST = np.float32(-87.0)
"""exp of it is the least that float32 holds without loss."""


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `specdec_core.ops.attention.paged_attention`. Long prefills, which are matrix
    products, and types other than float32 and bfloat16 are left to it."""
    if not {query.dtype, keys.dtype, values.dtype} <= DTYPES:
        reference = ops.REFERENCE["paged_attention"]
        return reference(query, keys, values, plan, scaling, window=window, softcap=softcap, sinks=sinks)
    output = query.new_empty(*query.shape[:2], values.shape[2])
    output[sum(plan.metadata.lengths) :] = 0
    for segment in plan.long_segments:
        attended = attend(query, keys, values, segment, scaling, window, softcap, sinks)
        output.index_copy_(0, segment.valid_tokens, attended.index_select(0, segment.valid_rows))
    if _MEMO not in plan.memo:
        plan.memo[_MEMO] = _pass_arrays(plan)
    chunks, prefix_lens, more_slots, block_tables = plan.memo[_MEMO]
    in_parallel(
        _attend,
        as_array(query.contiguous()),
        as_array(keys),
        as_array(values),
        chunks,
        prefix_lens,
        more_slots,
        block_tables,
        plan.metadata.block_size,
        _heads_per_item(keys.shape[1], len(chunks), torch.get_num_threads()),
        float(scaling),
        window or 0,
        float(softcap or 0),
        _NO_SINKS if sinks is None else sinks.float().numpy(),
        as_array(output),
    )
    return output


_MEMO = "specdec_kernels"
_NO_SINKS = np.empty(0, dtype=np.float32)


def _pass_arrays(plan: AttentionPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What `_attend` needs to know of a pass: chunks, prefix_lens, more_slots, block_tables."""
    lengths, seen = plan.metadata.lengths, plan.visibility
    spans = [
        (b, end - n, end) for b, (n, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)) if n <= SHORT
    ]
    chunks = [(b, i, min(MAX_ROWS, end - i)) for b, start, end in spans for i in range(start, end, MAX_ROWS)]
    return (
        np.array(chunks, dtype=np.int64).reshape(-1, 3),
        seen.prefix_lens.numpy(),
        np.empty((1, 0), dtype=np.int64) if seen.more_slots is None else seen.more_slots.numpy(),
        plan.metadata.block_tables.numpy(),
    )


def _heads_per_item(num_kv_heads: int, num_chunks: int, num_threads: int) -> int:
    """All key heads of a slot lie side by side: read them together, unless that leaves threads without work."""
    divisors = (n for n in range(num_kv_heads, 0, -1) if num_kv_heads % n == 0)
    return next((n for n in divisors if num_kv_heads // n * num_chunks >= 2 * num_threads), 1)


def store_kv(
    keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """See `specdec_core.ops.attention.store_kv`."""
    if keys.dtype not in DTYPES or {values.dtype, key.dtype, value.dtype} != {keys.dtype}:
        ops.REFERENCE["store_kv"](keys, values, slot_mapping, key, value)
        return
    slots = slot_mapping.numpy()
    as_array(keys)[slots] = as_array(key)
    as_array(values)[slots] = as_array(value)


@compiled(parallel=True)
def _attend(
    query,  # [num_tokens, num_heads, key_dim]
    keys,  # [num_slots + 1, num_kv_heads, key_dim]
    values,  # [num_slots + 1, num_kv_heads, value_dim]
    chunks,  # int64 [num_chunks, 3]   request, first token, number of tokens
    prefix_lens,  # int64 [num_tokens]
    more_slots,  # int64 [num_tokens, n] or [1, 0]   from the token itself up to its root's slot, which repeats
    block_tables,  # int64 [batch, max_blocks]
    block_size,
    heads_per_item,  # key heads that one thread takes at a time; divides num_kv_heads
    scaling,
    window,  # 0: none
    softcap,  # 0: none
    sinks,  # float32 [num_heads] or [0]: none
    output,  # [num_tokens, num_heads, value_dim]
):
    num_spans = keys.shape[1] // heads_per_item
    for item in prange(len(chunks) * num_spans):
        _attend_rows(
            query,
            keys,
            values,
            chunks[item // num_spans],
            item % num_spans * heads_per_item,
            heads_per_item,
            prefix_lens,
            more_slots,
            block_tables,
            block_size,
            scaling,
            window,
            softcap,
            sinks,
            output,
        )


@njit(fastmath=FAST, error_model="numpy")  # a row that sees nothing is NaN, not an exception
def _attend_rows(
    query,
    keys,
    values,
    chunk,
    first_head,
    num_heads,
    prefix_lens,
    more_slots,
    block_tables,
    block_size,
    scaling,
    window,
    softcap,
    sinks,
    output,
):
    """The query heads that share the key heads [first_head, first_head + num_heads), of num_rows tokens of a request.

    A token's path is what it sees: its prefix, then its ancestors below that, then itself. The path is cut into tiles
    at multiples of TILE. Tiles within everyone's prefix are read once for all tokens.
    """
    request, first_token, num_rows = chunk
    groups, key_dim, value_dim = query.shape[1] // keys.shape[1], keys.shape[2], values.shape[2]
    lengths = np.empty(num_rows, dtype=np.int64)
    firsts = np.zeros(num_rows, dtype=np.int64)
    first, longest, num_shared = np.iinfo(np.int64).max, 0, np.iinfo(np.int64).max
    for row in range(num_rows):
        prefix_len = prefix_lens[first_token + row]
        lengths[row] = prefix_len + _num_more(prefix_len, more_slots, (first_token + row) % len(more_slots))
        if window > 0:
            firsts[row] = max(lengths[row] - window, 0)
        first, longest = min(first, firsts[row]), max(longest, lengths[row])
        num_shared = min(num_shared, prefix_len)
    first_tile, num_tiles, num_shared = first // TILE, (longest + TILE - 1) // TILE, num_shared // TILE
    num_keys = num_tiles * TILE
    path = np.empty((num_rows, num_keys), dtype=np.int64)
    for row in range(num_rows):
        token = first_token + row
        _fill_path(
            path[row],
            lengths[row],
            prefix_lens[token],
            more_slots,
            token % len(more_slots),
            block_tables[request],
            block_size,
        )

    # The query heads of a key head, token by token: i counts (key head, token, query head of the key head).
    num_queries = num_heads * num_rows * groups
    width = (key_dim + LANES - 1) // LANES * LANES
    scaled = np.zeros(num_queries * width, dtype=np.float32)
    for i in range(num_queries):
        row, head = i // groups % num_rows, (first_head + i // groups // num_rows) * groups + i % groups
        for d in range(key_dim):
            scaled[i * width + d] = load(query[first_token + row, head, d]) * np.float32(scaling)
    scores = np.zeros(num_queries * num_keys, dtype=np.float32)
    tile = np.zeros((TILE, width), dtype=np.float32)
    for t in range(first_tile, num_tiles):
        for h in range(num_heads):
            for row in range(num_rows):
                if t >= num_shared or row == 0:
                    _read_tile(keys, first_head + h, path, row, t * TILE, tile)
                for i in range((h * num_rows + row) * groups, (h * num_rows + row + 1) * groups):
                    dot_tile(scaled, i * width, tile, scores, i * num_keys + t * TILE)

    sums = np.empty(num_queries, dtype=np.float32)
    for i in range(num_queries):
        row, head = i // groups % num_rows, (first_head + i // groups // num_rows) * groups + i % groups
        sink = sinks[head] if len(sinks) else np.float32(-np.inf)
        sums[i] = _softmax(scores[i * num_keys : (i + 1) * num_keys], firsts[row], lengths[row], softcap, sink)

    width = (value_dim + LANES - 1) // LANES * LANES
    attended = np.zeros(num_queries * width, dtype=np.float32)
    tile = np.zeros((TILE, width), dtype=np.float32)
    for t in range(first_tile, num_tiles):
        for h in range(num_heads):
            for row in range(num_rows):
                if t >= num_shared or row == 0:
                    _read_tile(values, first_head + h, path, row, t * TILE, tile)
                for i in range((h * num_rows + row) * groups, (h * num_rows + row + 1) * groups):
                    add_tile(scores, i * num_keys + t * TILE, tile, attended, i * width)
    for i in range(num_queries):
        row, head = i // groups % num_rows, (first_head + i // groups // num_rows) * groups + i % groups
        for d in range(value_dim):
            output[first_token + row, head, d] = as_stored(output, attended[i * width + d] / sums[i])


@njit
def _num_more(prefix_len, more_slots, row):
    """How many of more_slots[row], which go up to the root and then repeat it, lie beyond the prefix."""
    num_more, last = 0, np.int64(-1)
    for i in range(more_slots.shape[1]):
        slot = more_slots[row, i]
        num_more += slot >= prefix_len and slot != last
        last = slot
    return num_more


@njit
def _fill_path(path, length, prefix_len, more_slots, more_row, block_table, block_size):
    """path[i]: where the caches hold the i-th token on the way from the first to this one; -1: there is none."""
    for start in range(0, prefix_len, block_size):
        place = block_table[start // block_size] * block_size
        for i in range(min(block_size, prefix_len - start)):
            path[start + i] = place + i
    i, last = length - 1, np.int64(-1)
    for column in range(more_slots.shape[1]):
        slot = more_slots[more_row, column]
        if slot >= prefix_len and slot != last:
            path[i] = block_table[slot // block_size] * block_size + slot % block_size
            i -= 1
        last = slot
    for i in range(length, len(path)):
        path[i] = -1


@njit
def _read_tile(cache, kv_head, path, row, start, tile):
    """tile[j] = the cache's numbers for path[row, start + j], as float32; 0 where there is no such token."""
    for j in range(TILE):
        place = path[row, start + j]
        if place < 0:
            for d in range(cache.shape[2]):
                tile[j, d] = 0
        else:
            for d in range(cache.shape[2]):
                tile[j, d] = load(cache[place, kv_head, d])


@njit(fastmath=FAST)
def _softmax(row, first, end, softcap, sink):
    """Turn the scores row[first:end] into exp(score - highest), the rest into 0. Returns their sum, the sink's share
    included."""
    if softcap > 0:
        for j in range(first, end):
            row[j] = np.float32(softcap * np.tanh(row[j] / softcap))
    highest = _highest(row[first:end], sink)
    total = np.float32(0)
    for j in range(first, end):
        row[j] = _exp(row[j] - highest)
        total += row[j]
    row[:first] = 0
    row[end:] = 0
    return total + _exp(sink - highest) if sink > -np.inf else total


@njit(fastmath=FAST | {"nnan"})
def _highest(row, highest):
    """The greatest of row and highest, passing over NaN: it comes up again in the sums."""
    for score in row:
        highest = max(highest, score)
    return highest


@njit(fastmath=FAST)
def _exp(x):
    """exp for x <= 0 in float32, by branch-free arithmetic that compilers turn into vectors: 2**n times a polynomial
    (Taylor, degree 7) on [-ln 2 / 2, ln 2 / 2]. The error is below 3e-7 of the value."""
    x = max(x, _LOWEST)
    n = np.int32(x * _LOG2_E - np.float32(0.5))
    r = x - np.float32(n) * np.float32(0.693359375)
    r = r + np.float32(n) * np.float32(2.12194440e-4)
    p = np.float32(1.0 / 5040.0)
    p = p * r + np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    return p * bits_to_float((n + np.int32(127)) << np.int32(23))
