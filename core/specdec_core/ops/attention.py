"""Attention of one flat batch of tokens over paged keys and values: the reference in torch."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec_core.ops.attention_plan import AttentionPlan


def store_kv(
    keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Write key [num_tokens, num_kv_heads, key_dim] and value [..., value_dim] into the caches [num_slots + 1, ...] at
    slot_mapping int64 [num_tokens]. -1 is the row that nobody reads."""
    keys[slot_mapping] = key
    values[slot_mapping] = value


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan, scaling: float
) -> torch.Tensor:
    """query [num_tokens, num_heads, key_dim] over caches [num_slots + 1, num_kv_heads, ...], as `plan` says.

    Returns [num_tokens, num_heads, value_dim]; rows that belong to no request are 0. The query heads that share a key
    head are folded into rows, so that one batched call without copies of the keys serves grouped-query attention.
    """
    num_kv_heads, value_dim = values.shape[1:]
    num_tokens, num_heads, key_dim = query.shape
    groups = num_heads // num_kv_heads
    output = query.new_zeros(num_tokens, num_heads, value_dim)
    for segment in plan.segments:
        batch, num_rows = segment.token_rows.shape
        num_keys = segment.key_slots.shape[1]
        slots = segment.key_slots.flatten()
        q = query if segment.is_whole else query.index_select(0, segment.token_rows.flatten())
        q = q.view(batch, num_rows, num_kv_heads, groups, key_dim).permute(0, 2, 3, 1, 4)
        attended = scaled_dot_product_attention(
            q.reshape(batch, num_kv_heads, groups * num_rows, key_dim),
            keys.index_select(0, slots).view(batch, num_keys, num_kv_heads, key_dim).transpose(1, 2),
            values.index_select(0, slots).view(batch, num_keys, num_kv_heads, value_dim).transpose(1, 2),
            attn_mask=segment.mask(groups, query.dtype),
            scale=scaling,
        )
        attended = attended.view(batch, num_kv_heads, groups, num_rows, value_dim).permute(0, 3, 1, 2, 4)
        attended = attended.reshape(batch * num_rows, num_heads, value_dim)
        if segment.is_whole:
            return attended
        output.index_copy_(0, segment.valid_tokens, attended.index_select(0, segment.valid_rows))
    return output
