"""Attention over paged keys and values, with trees of draft tokens (tree attention).

The keys that a token attends to have the positions 0, 1, 2 and so on. They are read in tiles of BLOCK_KEYS positions,
and tiles are summed in parts of PART positions, which are then added up in order (online softmax; Dao et al. 2022,
2023). So a token's result follows from its own path alone: that its keys lie in other slots, that other tokens share
its tile, or that several programs compute its parts, does not change a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_core.ops.attention_plan import AttentionPlan
from specdec_kernels.gpu.interpreted import AS_WRITTEN, product, round_to
from specdec_kernels.gpu.pass_layout import PassLayout, layout_of

BLOCK_ROWS, BLOCK_KEYS = 64, 64
"""Query rows (of tokens and of the heads that share a key head) and keys of a matrix product. One shape for all:
another one could sum in another order."""
PART = 256
"""Positions of a part; a multiple of BLOCK_KEYS."""
FEW_PROGRAMS = 512
"""If there are fewer programs than this with all parts of a tile in one, each part gets its own."""
MOST_PARTIAL_BYTES = 2**28
"""Of partial results in memory."""
LOG2_E = tl.constexpr(1.4426950408889634)


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
    """As `specdec_core.ops.attention.paged_attention`. Padding tokens get zeros."""
    if not query.dtype == keys.dtype == values.dtype:
        raise RuntimeError(f"query, keys and values have the dtypes {query.dtype}, {keys.dtype} and {values.dtype}")
    num_tokens, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = values.shape[1:]
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    block_rows = max(BLOCK_ROWS, padded_group)
    layout = layout_of(plan, block_rows // padded_group)
    output = query.new_zeros(num_tokens, num_heads, value_dim)
    if not len(layout.tiles):
        return output
    query = query if query.stride(2) == 1 else query.contiguous()
    block_value = max(16, triton.next_power_of_2(value_dim))
    num_parts = _programs_per_tile(layout, num_tokens, num_heads, num_kv_heads, block_value)
    is_whole = num_parts == 1
    partial, stats = output, output  # not used
    if not is_whole:
        partial = query.new_empty((num_tokens, num_heads, num_parts, block_value), dtype=torch.float32)
        stats = query.new_empty((num_tokens, num_heads, num_parts, 2), dtype=torch.float32)
    features = {
        "HAS_WINDOW": window is not None,
        "HAS_SINKS": sinks is not None,
        "VALUE_DIM": value_dim,
        "BLOCK_VALUE": block_value,
    }
    nothing = layout.num_keys
    _attend[(len(layout.tiles), num_kv_heads, num_parts)](
        query,
        keys,
        values,
        output,
        partial,
        stats,
        layout.tiles,
        plan.prefix_lens,
        layout.num_keys,
        nothing if layout.paths is None else layout.paths,
        nothing if layout.paths is None else plan.tree_start,
        plan.block_tables,
        nothing if sinks is None else sinks.contiguous(),
        scaling * LOG2_E.value,
        (softcap or 1.0) * LOG2_E.value,
        scaling / (softcap or 1.0),
        window or 0,
        0 if layout.paths is None else layout.paths.stride(0),
        plan.block_tables.stride(0),
        plan.metadata.block_size,
        *query.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        HAS_SOFTCAP=softcap is not None,
        HAS_TREE=layout.paths is not None,
        IS_WHOLE=is_whole,
        GROUP=group,
        PADDED_GROUP=padded_group,
        KEY_DIM=key_dim,
        BLOCK_KEY=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_ROWS=block_rows,
        BLOCK_KEYS=BLOCK_KEYS,
        PART=PART,
        num_warps=4,
        **AS_WRITTEN,
        **features,
    )
    if not is_whole:
        _add_parts[(num_tokens, num_heads)](
            output,
            partial,
            stats,
            layout.num_keys,
            nothing if sinks is None else sinks.contiguous(),
            window or 0,
            num_parts,
            PART=PART,
            num_warps=4,
            **AS_WRITTEN,
            **features,
        )
    return output


def shared_bytes(key_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """At least as many bytes of shared memory as a program takes: a tile of queries, and two of keys and of values."""
    widths = [max(16, triton.next_power_of_2(width)) for width in (key_dim, value_dim)]
    return BLOCK_KEYS * dtype.itemsize * (widths[0] + 2 * sum(widths)) + 2**12


def _programs_per_tile(layout: PassLayout, num_tokens: int, num_heads: int, num_kv_heads: int, width: int) -> int:
    """Into how many programs the parts of a tile are divided: one each, or 1. That changes no result."""
    num_parts = -(-layout.most_keys // PART)
    is_large = 4 * num_tokens * num_heads * num_parts * width > MOST_PARTIAL_BYTES
    return 1 if is_large or len(layout.tiles) * num_kv_heads >= FEW_PROGRAMS else num_parts


@triton.jit(do_not_specialize=["path_stride", "table_stride"])
def _attend(
    query_at,
    keys_at,
    values_at,
    output_at,
    partial_at,
    stats_at,
    tiles_at,
    prefix_lens_at,
    num_keys_at,
    paths_at,
    tree_start_at,
    tables_at,
    sinks_at,
    scaling,  # times log2(e)
    softcap,  # times log2(e)
    scaling_by_softcap,
    window,
    path_stride,
    table_stride,
    block_size,
    query_token_stride,
    query_head_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    HAS_TREE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PART: tl.constexpr,
):
    """One tile of tokens of a request, and the heads that share a key head: all parts, or one of them."""
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = tl.load(tiles_at + 3 * tile)
    first = tl.load(tiles_at + 3 * tile + 1)
    count = tl.load(tiles_at + 3 * tile + 2)
    row = tl.arange(0, BLOCK_ROWS)
    local, in_group = row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (local < count) & (in_group < GROUP)
    token = (first + local).to(tl.int64)
    head = kv_head * GROUP + in_group
    key_column, value_column = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    query = tl.load(
        query_at + token[:, None] * query_token_stride + head[:, None] * query_head_stride + key_column[None, :],
        mask=is_row[:, None] & (key_column < KEY_DIM)[None, :],
        other=0.0,
    )
    prefix = tl.load(prefix_lens_at + token, mask=is_row, other=0)
    num_keys = tl.load(num_keys_at + token, mask=is_row, other=0)
    # Of a node of a tree, the tile of positions in which its tree begins is read for it alone, and so are the next.
    common = tl.where(num_keys > prefix, prefix // BLOCK_KEYS * BLOCK_KEYS, prefix)
    seen_from = tl.maximum(num_keys - window, 0) if HAS_WINDOW else tl.zeros_like(num_keys)
    nearest = tl.min(tl.where(is_row, seen_from, 2147483647)) // BLOCK_KEYS * BLOCK_KEYS
    most_common, most = tl.max(common), tl.max(num_keys)
    in_part = tl.arange(0, BLOCK_KEYS)
    table_at = tables_at + request * table_stride
    key_at, value_at = keys_at + kv_head * key_head_stride, values_at + kv_head * value_head_stride

    sum_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    sum_weight = tl.zeros([BLOCK_ROWS], tl.float32)
    sum_value = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    first_part = nearest // PART if IS_WHOLE else part
    end_part = tl.cdiv(most, PART) if IS_WHOLE else part + 1
    for each in range(first_part, end_part):
        begin, end = tl.maximum(each * PART, nearest), each * PART + PART
        best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_ROWS], tl.float32)
        value = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
        for start in range(begin, tl.minimum(end, most_common), BLOCK_KEYS):
            position = start + in_part
            is_there = position < most_common
            is_seen = (position[None, :] < common[:, None]) & (position[None, :] >= seen_from[:, None])
            block = tl.load(table_at + position // block_size, mask=is_there, other=0).to(tl.int64)
            slot = block * block_size + position % block_size
            best, weight, value = _add_keys(
                query, key_at, value_at, slot, is_there, is_seen, best, weight, value, scaling, softcap,
                scaling_by_softcap, key_slot_stride, value_slot_stride, HAS_SOFTCAP, KEY_DIM, VALUE_DIM, BLOCK_KEY,
                BLOCK_VALUE,
            )  # fmt: skip
        if HAS_TREE:
            tree_start = tl.load(tree_start_at + request)
            has_node = tl.max(num_keys - prefix) > 0
            for other in range(tl.where(has_node, count, 0)):
                own_prefix = tl.load(prefix_lens_at + first + other)
                own_keys = tl.load(num_keys_at + first + other)
                own_begin = tl.maximum(own_prefix // BLOCK_KEYS * BLOCK_KEYS, begin)
                own_end = tl.where(own_keys > own_prefix, tl.minimum(own_keys, end), 0)
                for start in range(own_begin, own_end, BLOCK_KEYS):
                    position = start + in_part
                    is_there = position < own_keys
                    is_node = is_there & (position >= own_prefix)
                    path_at = paths_at + (first + other).to(tl.int64) * path_stride
                    node = tl.load(path_at + position - own_prefix, mask=is_node, other=0)
                    place = tl.where(is_node, tree_start + node, position)
                    block = tl.load(table_at + place // block_size, mask=is_there, other=0).to(tl.int64)
                    slot = block * block_size + place % block_size
                    is_own = local == other
                    is_seen = is_there[None, :] & (position[None, :] >= seen_from[:, None])
                    new_best, new_weight, new_value = _add_keys(
                        query, key_at, value_at, slot, is_there, is_seen, best, weight, value, scaling, softcap,
                        scaling_by_softcap, key_slot_stride, value_slot_stride, HAS_SOFTCAP, KEY_DIM, VALUE_DIM,
                        BLOCK_KEY, BLOCK_VALUE,
                    )  # fmt: skip
                    best = tl.where(is_own, new_best, best)
                    weight = tl.where(is_own, new_weight, weight)
                    value = tl.where(is_own[:, None], new_value, value)  # what is NaN stays on its branch
        if IS_WHOLE:
            sum_max, sum_weight, sum_value = _add_part(sum_max, sum_weight, sum_value, best, weight, value)
        else:
            at = (token * (GROUP * tl.num_programs(1)) + head) * tl.num_programs(2) + part
            is_read = is_row & (part * PART < num_keys)
            tl.store(stats_at + 2 * at, best, mask=is_read)
            tl.store(stats_at + 2 * at + 1, weight, mask=is_read)
            tl.store(partial_at + at[:, None] * BLOCK_VALUE + value_column[None, :], value, mask=is_read[:, None])
    if IS_WHOLE:
        if HAS_SINKS:
            sink = tl.load(sinks_at + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            sum_max, sum_weight, sum_value = _add_part(
                sum_max, sum_weight, sum_value, sink, tl.full([BLOCK_ROWS], 1.0, tl.float32), tl.zeros_like(sum_value)
            )
        out = sum_value / tl.where(sum_weight > 0, sum_weight, 1.0)[:, None]
        at = (token * (GROUP * tl.num_programs(1)) + head)[:, None] * VALUE_DIM + value_column[None, :]
        is_stored = (is_row & (num_keys > 0))[:, None] & (value_column < VALUE_DIM)[None, :]
        tl.store(output_at + at, round_to(out, output_at.dtype.element_ty), mask=is_stored)


@triton.jit
def _add_keys(
    query, key_at, value_at, slot, is_there, is_seen, best, weight, value, scaling, softcap, scaling_by_softcap,
    key_slot_stride, value_slot_stride, HAS_SOFTCAP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to a part. Rows that see none of them keep what they have, to the last bit."""
    key_column, value_column = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    keys = tl.load(
        key_at + slot[:, None] * key_slot_stride + key_column[None, :],
        mask=is_there[:, None] & (key_column < KEY_DIM)[None, :],
        other=0.0,
    )
    values = tl.load(
        value_at + slot[:, None] * value_slot_stride + value_column[None, :],
        mask=is_there[:, None] & (value_column < VALUE_DIM)[None, :],
        other=0.0,
    )
    scores = product(query, tl.trans(keys), tl.zeros(is_seen.shape, tl.float32))
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * scaling_by_softcap * 2.0 * LOG2_E) + 1.0))
    else:
        scores = scores * scaling
    scores = tl.where(is_seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    around = tl.where(new_best == float("-inf"), 0.0, new_best)
    kept = tl.exp2(best - around)
    weights = tl.exp2(scores - around[:, None])
    value = product(round_to(weights, values.dtype), values, value * kept[:, None])
    return new_best, weight * kept + tl.sum(weights, 1), value


@triton.jit
def _add_part(sum_max, sum_weight, sum_value, best, weight, value):
    """Add a part to those before it."""
    new_max = tl.maximum(sum_max, best)
    around = tl.where(new_max == float("-inf"), 0.0, new_max)
    kept, added = tl.exp2(sum_max - around), tl.exp2(best - around)
    # Written as fma, so that all kernels round alike.
    sum_weight = tl.fma(sum_weight, kept, weight * added)
    sum_value = tl.fma(sum_value, tl.broadcast_to(kept[:, None], sum_value.shape), value * added[:, None])
    return new_max, sum_weight, sum_value


@triton.jit(do_not_specialize=["num_parts"])
def _add_parts(
    output_at,
    partial_at,
    stats_at,
    num_keys_at,
    sinks_at,
    window,
    num_parts,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    PART: tl.constexpr,
):
    """Add up the parts of one head of a token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_keys = tl.load(num_keys_at + token)
    first = tl.maximum(num_keys - window, 0) // PART if HAS_WINDOW else 0
    column = tl.arange(0, BLOCK_VALUE)
    sum_max = tl.full([1], float("-inf"), tl.float32)
    sum_weight = tl.zeros([1], tl.float32)
    sum_value = tl.zeros([1, BLOCK_VALUE], tl.float32)
    row = token * tl.num_programs(1) + head
    for part in range(first, tl.cdiv(num_keys, PART)):
        at = row * num_parts + part
        best = tl.load(stats_at + 2 * at + tl.arange(0, 1))
        weight = tl.load(stats_at + 2 * at + 1 + tl.arange(0, 1))
        value = tl.load(partial_at + at * BLOCK_VALUE + column)[None, :]
        sum_max, sum_weight, sum_value = _add_part(sum_max, sum_weight, sum_value, best, weight, value)
    if HAS_SINKS:
        sink = tl.load(sinks_at + head + tl.arange(0, 1)).to(tl.float32) * LOG2_E
        sum_max, sum_weight, sum_value = _add_part(
            sum_max, sum_weight, sum_value, sink, tl.full([1], 1.0, tl.float32), tl.zeros_like(sum_value)
        )
    if num_keys > 0:
        out = sum_value / tl.where(sum_weight > 0, sum_weight, 1.0)[:, None]
        at = row * VALUE_DIM + column[None, :]
        tl.store(output_at + at, round_to(out, output_at.dtype.element_ty), mask=(column < VALUE_DIM)[None, :])
