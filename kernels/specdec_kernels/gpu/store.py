"""Writes a forward pass's keys and values into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.gpu.interpreted import AS_WRITTEN


def store_kv(
    keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """As `specdec_core.ops.attention.store_kv`. Slots that the caches do not have are skipped, as -1 is."""
    if not keys.dtype == values.dtype == key.dtype == value.dtype:
        raise RuntimeError(f"keys of dtype {key.dtype} and values of {value.dtype} do not go into a {keys.dtype} cache")
    num_tokens, num_heads, key_dim = key.shape
    if not num_tokens:
        return
    value_dim = value.shape[2]
    key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (key, value))
    _store[(num_tokens,)](
        keys,
        values,
        slot_mapping.contiguous(),
        key,
        value,
        len(keys) - 1,
        *keys.stride()[:2],
        *values.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK=triton.next_power_of_2(max(key_dim, value_dim)),
        num_warps=4,
        **AS_WRITTEN,
    )


@triton.jit
def _store(
    keys_at,
    values_at,
    slots_at,
    key_at,
    value_at,
    num_slots,
    keys_slot_stride,
    keys_head_stride,
    values_slot_stride,
    values_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_at + token).to(tl.int64)
    head, column = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    place = slot + tl.zeros_like(head)
    is_there = (place >= 0) & (place < num_slots) & (head < NUM_HEADS)
    is_key, is_value = is_there & (column < KEY_DIM), is_there & (column < VALUE_DIM)
    key = tl.load(key_at + token * key_token_stride + head * key_head_stride + column, mask=is_key)
    value = tl.load(value_at + token * value_token_stride + head * value_head_stride + column, mask=is_value)
    tl.store(keys_at + slot * keys_slot_stride + head * keys_head_stride + column, key, mask=is_key)
    tl.store(values_at + slot * values_slot_stride + head * values_head_stride + column, value, mask=is_value)
