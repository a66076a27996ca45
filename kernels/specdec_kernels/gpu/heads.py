"""From the product of query, key and value to attention, in one kernel: norms of heads, rotary embedding (Su et al.
2021), and the write of keys and values to the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_core.ops.decoder import Angles, Cache, DecoderLayer, Norm
from specdec_kernels.gpu.interpreted import AS_WRITTEN
from specdec_kernels.gpu.norm import scaled, squared
from specdec_kernels.gpu.rotary import rotated


def place_heads(
    heads: torch.Tensor,
    layer: DecoderLayer,
    angles: Angles,
    positions: torch.Tensor | None,
    cache: Cache,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Write a layer's keys and values to its cache. Returns the queries, [num_tokens, num_heads, head_dim].

    heads: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous.
    angles: cos and sin, [num_positions, head_dim] each, with contiguous rows, of the same dtype.
    positions: int64 [num_tokens], rows of these tables; for others, the nearest row. None: token i has row i.
    slots: int64 [num_tokens]. Nothing is written for those that the cache does not have, such as -1.
    """
    num_tokens, half = len(heads), layer.head_dim // 2
    query = heads.new_empty(num_tokens, layer.num_heads, layer.head_dim)
    if not num_tokens:
        return query
    (cos, sin), (keys, values) = angles, cache
    group = layer.num_heads // layer.num_kv_heads
    block_group, block_half = triton.next_power_of_2(group), triton.next_power_of_2(half)
    _place[(num_tokens, layer.num_kv_heads)](
        heads,
        cos,
        sin,
        slots if positions is None else positions,
        slots,
        query,
        keys,
        values,
        *_weights(layer.query_norm, heads),
        *_weights(layer.key_norm, heads),
        min(len(cos), len(sin)),
        min(len(keys), len(values)),
        cos.stride(0),
        sin.stride(0),
        keys.stride(0),
        values.stride(0),
        HAS_POSITIONS=positions is not None,
        NORMS_QUERY=layer.query_norm is not None,
        ROUNDS_QUERY_FIRST=layer.query_norm is not None and layer.query_norm.rounds_first,
        NORMS_KEY=layer.key_norm is not None,
        ROUNDS_KEY_FIRST=layer.key_norm is not None and layer.key_norm.rounds_first,
        GROUP=group,
        HALF=half,
        BLOCK_GROUP=block_group,
        BLOCK_HALF=block_half,
        num_warps=min(8, max(1, block_group * block_half // 512)),
        **AS_WRITTEN,
    )
    return query


def _weights(norm: Norm | None, otherwise: torch.Tensor) -> tuple[torch.Tensor, float]:
    return (otherwise, 0.0) if norm is None else (norm.weight.contiguous(), norm.eps)


@triton.jit(do_not_specialize=["num_positions", "num_slots"])
def _place(
    heads_at,
    cos_at,
    sin_at,
    positions_at,
    slots_at,
    query_at,
    keys_at,
    values_at,
    query_weight_at,
    query_eps,
    key_weight_at,
    key_eps,
    num_positions,
    num_slots,
    cos_stride,
    sin_stride,
    key_stride,
    value_stride,
    HAS_POSITIONS: tl.constexpr,
    NORMS_QUERY: tl.constexpr,
    ROUNDS_QUERY_FIRST: tl.constexpr,
    NORMS_KEY: tl.constexpr,
    ROUNDS_KEY_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """A key head of one token, and the query heads that share it."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    at = tl.load(positions_at + token) if HAS_POSITIONS else token
    at = tl.minimum(tl.maximum(at, 0), num_positions - 1)
    column = tl.arange(0, BLOCK_HALF)[None, :]
    is_column = column < HALF
    cos, sin = cos_at + at * cos_stride + column, sin_at + at * sin_stride + column
    cos_left, cos_right = tl.load(cos, mask=is_column), tl.load(cos + HALF, mask=is_column)
    sin_left, sin_right = tl.load(sin, mask=is_column), tl.load(sin + HALF, mask=is_column)

    in_group = tl.arange(0, BLOCK_GROUP)[:, None]
    is_query = (in_group < GROUP) & is_column
    head = kv_head * GROUP + in_group
    num_heads = num_kv_heads * GROUP
    own_heads_at = heads_at + token * (num_heads + 2 * num_kv_heads) * (2 * HALF)
    given = own_heads_at + head * (2 * HALF) + column
    left, right = tl.load(given, mask=is_query, other=0.0), tl.load(given + HALF, mask=is_query, other=0.0)
    if NORMS_QUERY:
        left, right = _normed(left, right, query_weight_at + column, is_column, query_eps, HALF, ROUNDS_QUERY_FIRST)
    left, right = rotated(left, right, cos_left, cos_right, sin_left, sin_right)
    query = query_at + (token * num_heads + head) * (2 * HALF) + column
    tl.store(query, left, mask=is_query)
    tl.store(query + HALF, right, mask=is_query)

    slot = tl.load(slots_at + token).to(tl.int64) + tl.zeros_like(column)
    is_stored = is_column & (slot >= 0) & (slot < num_slots)
    given = own_heads_at + (num_heads + kv_head) * (2 * HALF) + column
    left, right = tl.load(given, mask=is_column, other=0.0), tl.load(given + HALF, mask=is_column, other=0.0)
    if NORMS_KEY:
        left, right = _normed(left, right, key_weight_at + column, is_column, key_eps, HALF, ROUNDS_KEY_FIRST)
    left, right = rotated(left, right, cos_left, cos_right, sin_left, sin_right)
    key = keys_at + slot * key_stride + kv_head * (2 * HALF) + column
    tl.store(key, left, mask=is_stored)
    tl.store(key + HALF, right, mask=is_stored)

    given += num_kv_heads * (2 * HALF)
    value = values_at + slot * value_stride + kv_head * (2 * HALF) + column
    tl.store(value, tl.load(given, mask=is_column), mask=is_stored)
    tl.store(value + HALF, tl.load(given + HALF, mask=is_column), mask=is_stored)


@triton.jit
def _normed(left, right, weight_at, is_column, eps, HALF: tl.constexpr, ROUNDS_FIRST: tl.constexpr):
    """Both halves of heads, [num_heads, HALF] each."""
    sums = (tl.sum(squared(left), 1) + tl.sum(squared(right), 1))[:, None]
    of_left = tl.load(weight_at, mask=is_column, other=0.0)
    of_right = tl.load(weight_at + HALF, mask=is_column, other=0.0)
    left = scaled(left, sums, of_left, eps, 2 * HALF, ROUNDS_FIRST)
    return left, scaled(right, sums, of_right, eps, 2 * HALF, ROUNDS_FIRST)
