"""Attention of one flat batch of tokens over paged keys and values: the reference in torch."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec_core.ops.attention_plan import AttentionPlan, Segment


def store_kv(
    keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Write a forward pass's keys and values into a layer's cache.

    keys, values: the caches [num_slots + 1, num_kv_heads, key_dim or value_dim], changed in place.
    slot_mapping: int64 [num_tokens], the KV-cache slot of each token. Padding has -1, the last row of the caches, which
        is never read; a kernel may skip it.
    key, value: what to write, [num_tokens, num_kv_heads, key_dim or value_dim].
    """
    keys[slot_mapping] = key
    values[slot_mapping] = value


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
    """Attention of query [num_tokens, num_heads, key_dim] over paged caches [num_slots + 1, num_kv_heads, ...].

    plan: the attention mask and the cache addresses of the forward pass.
    scaling: factor of query times key.
    window: sliding window: a query attends only to keys at positions above its own position minus `window`.
    softcap: scores become softcap * tanh(scores / softcap).
    sinks: [num_heads], attention sinks: a score for each head that joins the softmax but has no value.

    Returns [num_tokens, num_heads, value_dim]; the values for padding tokens are arbitrary. In grouped-query attention,
    the query heads that share a key head become rows of one matrix, so that keys are not copied for each of them.
    """
    output = query.new_zeros(*query.shape[:2], values.shape[2])
    for segment in plan.segments:
        attended = attend(query, keys, values, segment, scaling, window, softcap, sinks)
        if segment.is_whole:
            return attended
        output.index_copy_(0, segment.valid_tokens, attended.index_select(0, segment.valid_rows))
    return output


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segment: Segment,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention for one `Segment` of the plan: some requests, padded to the same number of query rows and of keys.

    query: [num_tokens, num_heads, key_dim].
    keys, values: the paged caches [num_slots + 1, num_kv_heads, key_dim or value_dim].
    scaling: factor of query times key.
    window: sliding window: a query attends only to keys at positions above its own position minus `window`.
    softcap: scores become softcap * tanh(scores / softcap).
    sinks: [num_heads], attention sinks: a score for each head that joins the softmax but has no value.

    Returns [batch * num_rows, num_heads, value_dim], padding included.
    """
    num_kv_heads, value_dim = values.shape[1:]
    num_heads, key_dim = query.shape[1:]
    groups = num_heads // num_kv_heads
    batch, num_rows = segment.token_rows.shape
    num_keys = segment.key_slots.shape[1]
    slots = segment.key_slots.flatten()
    q = query if segment.is_whole else query.index_select(0, segment.token_rows.flatten())
    q = q.view(batch, num_rows, num_kv_heads, groups, key_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, num_kv_heads, groups * num_rows, key_dim)
    k = keys.index_select(0, slots).view(batch, num_keys, num_kv_heads, key_dim).transpose(1, 2)
    v = values.index_select(0, slots).view(batch, num_keys, num_kv_heads, value_dim).transpose(1, 2)
    mask = segment.mask(groups, window, query.dtype)
    if softcap is None and sinks is None:
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    else:  # torch's fused attention has neither: scores and probabilities are float32
        scores = torch.matmul(q, k.transpose(2, 3)).float() * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + mask
        if sinks is not None:  # [num_heads] -> [1, num_kv_heads, groups * num_rows, 1]
            sinks = sinks.view(1, num_kv_heads, groups, 1, 1).expand(batch, -1, -1, num_rows, 1)
            sinks = sinks.reshape(batch, num_kv_heads, groups * num_rows, 1)
            scores = torch.cat([scores, sinks.float()], dim=-1)
        attended = torch.matmul(scores.softmax(dim=-1)[..., :num_keys].to(v.dtype), v)
    attended = attended.view(batch, num_kv_heads, groups, num_rows, value_dim).permute(0, 3, 1, 2, 4)
    return attended.reshape(batch * num_rows, num_heads, value_dim)
