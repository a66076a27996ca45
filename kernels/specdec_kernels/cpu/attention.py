"""Paged attention and tree attention on a CPU, reading keys and values in place: no gathering, padding or mask tensor.

A query's result depends only on the query, the keys that it attends to and their order from the first token to the
query's own. It does not depend on the number of tokens in the batch, nor on the KV-cache slots of the keys. So a draft
token in any tree gets, to the last bit, what plain decoding computes for the same tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen

from specdec_core import compiled, ops
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_kernels.cpu import amx
from specdec_kernels.cpu.attend import address_of_attend, attend_in_parts, attend_part
from specdec_kernels.cpu.bits import LIKE, array_at, inner
from specdec_kernels.cpu.paths import lay_out
from specdec_kernels.cpu.threads import WORTH_A_THREAD, in_parallel


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
    """The compiled form of `specdec_core.ops.attention.paged_attention`. If dtypes are mixed, the reference
    implementation is called, which raises an error."""
    if not query.dtype == keys.dtype == values.dtype:
        reference = ops.REFERENCE["paged_attention"]
        return reference(query, keys, values, plan, scaling, window=window, softcap=softcap, sinks=sinks)
    num_tokens, num_heads, key_dim = query.shape
    num_slots, num_kv_heads, value_dim = values.shape
    output = query.new_empty(num_tokens, num_heads, value_dim)
    paths = paths_of(plan)
    if paths.num_tokens < num_tokens:
        output[paths.num_tokens :] = 0
    if not len(paths.chunks):
        return output
    (query, query_stride), (keys, keys_stride), (values, values_stride) = map(_rows, (query, keys, values))
    args = (
        LIKE[query.dtype],
        (query.data_ptr(), keys.data_ptr(), values.data_ptr(), output.data_ptr()),
        (query_stride, keys_stride, values_stride),
        (num_tokens, num_slots, num_heads, num_kv_heads, key_dim, value_dim),
        paths.chunks,
        paths.paths,
        paths.places,
        int(amx.serves(query.dtype)),
        float(scaling),
        window or 0,
        float(softcap or 0),
        _NO_SINKS if sinks is None else sinks.float().numpy(),
    )
    num_parts = torch.get_num_threads()
    if num_parts == 1 or paths.num_pairs * num_heads * (key_dim + value_dim) < WORTH_A_THREAD:
        attend_part(0, 1, *args)
    else:
        in_parallel(attend_in_parts, address_of_attend(args[0].dtype), num_parts, *args)
    return output


def paths_of(plan: AttentionPlan) -> Paths:
    """Return the paths of a forward pass, computed once for all layers."""
    paths = plan.memo.get(_MEMO)
    if paths is None:
        paths = plan.memo[_MEMO] = Paths.of(plan)
    return paths


_MEMO = "specdec_kernels"
_NO_SINKS = np.empty(0, dtype=np.float32)


def _rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a tensor [n, heads, width] in which each row [heads, width] is contiguous, and its stride from row to row.
    The given tensor is copied only if its rows are not contiguous."""
    stride, *inner = tensor.stride()
    if inner != [tensor.shape[2], 1]:
        tensor = tensor.contiguous()
        stride = tensor.stride(0)
    if len(tensor) == 1:  # torch may give any stride where there is only one
        stride = tensor.shape[1] * tensor.shape[2]
    return tensor, stride


@frozen(eq=False)
class Paths:
    """The arguments of `attend_part` that all layers of a forward pass share. `lay_out` computes the arrays."""

    num_tokens: int  # without padding
    num_pairs: int  # pairs of a token and a key that it attends to, roughly
    chunks: np.ndarray
    paths: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, plan: AttentionPlan) -> Paths:
        metadata, seen = plan.metadata, plan.visibility
        chunks, paths, places, num_pairs = lay_out(
            np.array(metadata.lengths, dtype=np.int64),
            seen.prefix_lens.numpy(),
            _NO_SLOTS if seen.more_slots is None else seen.more_slots.numpy(),
            metadata.block_tables.numpy(),
            metadata.block_size,
        )
        return cls(sum(metadata.lengths), num_pairs, chunks, paths, places)


_NO_SLOTS = np.empty((1, 0), dtype=np.int64)


def store_kv(
    keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """The compiled form of `specdec_core.ops.attention.store_kv`. If an input has an unsuitable dtype, shape or memory
    layout, or a slot does not exist, the reference implementation is called, which raises the errors."""
    if not (_fits(keys, slot_mapping, key) and _fits(values, slot_mapping, value) and keys.dtype == values.dtype):
        ops.REFERENCE["store_kv"](keys, values, slot_mapping, key, value)
        return
    (key, key_stride), (value, value_stride) = _rows(key), _rows(value)
    slots = slot_mapping.contiguous()
    is_stored = _store(
        LIKE[keys.dtype],
        (slots.data_ptr(), len(slots)),
        (keys.data_ptr(), *keys.shape, key.data_ptr(), key_stride),
        (values.data_ptr(), *values.shape, value.data_ptr(), value_stride),
    )
    if not is_stored:
        ops.REFERENCE["store_kv"](keys, values, slot_mapping, key, value)


def _fits(cache: torch.Tensor, slots: torch.Tensor, given: torch.Tensor) -> bool:
    return (
        cache.dtype == given.dtype
        and cache.is_contiguous()
        and slots.dtype == torch.int64
        and given.shape == (len(slots), *cache.shape[1:])
    )


_SLOT = np.empty(0, dtype=np.int64)


@compiled()
def _store(like, slots, keys, values):
    """Store keys and values in their caches. Returns False, and stores nothing, if a slot does not exist.

    like: an array with the dtype of the caches and of the tensors to store.
    slots: address and length of the array of slots.
    keys, values: each the address and the shape of a cache, the address of the tensor to store, and the stride between
        its rows.
    """
    places = array_at(slots[0], (slots[1],), _SLOT)
    num_slots = min(keys[1], values[1])
    for place in places:
        if not -num_slots <= place < num_slots:
            return False
    _copy(like, places, keys)
    _copy(like, places, values)
    return True


@inner()
def _copy(like, places, there):
    address, num_slots, num_heads, width, given_address, stride = there
    row_len = num_heads * width
    cache = array_at(address, (num_slots, row_len), like)
    given = array_at(given_address, (len(places) * stride,), like)
    for row in range(len(places)):
        place, start = places[row], row * stride
        for i in range(row_len):  # numba compiles an assignment of slices for two seconds
            cache[place, i] = given[start + i]
