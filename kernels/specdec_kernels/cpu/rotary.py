"""Rotary position embedding (Su et al. 2021) of queries and keys in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec_core import compiled, ops
from specdec_kernels.cpu.bits import LIKE, array_at, as_stored, inner, load
from specdec_kernels.cpu.lanes import LANES, array_data, loader, rounded, store_rounded


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The compiled form of `specdec_core.ops.elementwise.rotary`. Calls the reference implementation for dtypes other
    than float32 and bfloat16, and for mixed dtypes. The results have tokens before heads in memory, as attention needs
    them."""
    if query.dtype not in LIKE or not query.dtype == key.dtype == cos.dtype == sin.dtype:
        return ops.REFERENCE["rotary"](query, key, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    query, key = _with_contiguous_heads(query), _with_contiguous_heads(key)
    rotated_query, rotated_key = _tokens_first(query), _tokens_first(key)
    _rotate(
        LIKE[query.dtype],
        (cos.data_ptr(), sin.data_ptr(), *cos.shape[1:]),
        (query.data_ptr(), *query.stride(), query.shape[1], rotated_query.data_ptr()),
        (key.data_ptr(), *key.stride(), key.shape[1], rotated_key.data_ptr()),
    )
    return rotated_query, rotated_key


def _with_contiguous_heads(heads: torch.Tensor) -> torch.Tensor:
    return heads if heads.stride(3) == 1 else heads.contiguous()


def _tokens_first(heads: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor with the shape [1, num_heads, num_tokens, width] and dtype of `heads`, but with
    tokens before heads in memory."""
    _, num_heads, num_tokens, width = heads.shape
    size = num_heads * width
    return heads.new_empty_strided(heads.shape, (num_tokens * size, width, size, 1))


@compiled()
def _rotate(like, angles, query, key):
    """Rotate queries and keys, and write the results to other arrays.

    like: an array with the dtype of all arrays.
    angles: the addresses of cos and sin, the number of tokens and the width.
    query, key: each the address, the four strides and the number of heads of a tensor, then the address of its result.
    """
    cos_address, sin_address, num_tokens, width = angles
    cos = array_at(cos_address, (num_tokens, width), like)
    sin = array_at(sin_address, (num_tokens, width), like)
    _rotate_heads(like, cos, sin, query)
    _rotate_heads(like, cos, sin, key)


@inner()
def _rotate_heads(like, cos, sin, there):
    """Rotate the heads of a query or key tensor.

    there: the address, the four strides and the number of heads of the tensor, then the address of the result.
    """
    address, _, head_stride, token_stride, _, num_heads, output_address = there
    num_tokens, width = cos.shape
    heads = array_at(address, (num_heads * head_stride + num_tokens * token_stride,), like)
    output = array_at(output_address, (num_tokens, num_heads, width), like)
    for token in range(num_tokens):
        for head in range(num_heads):
            start = head * head_stride + token * token_stride
            rotate_row(heads, start, cos[token], sin[token], output[token, head], 0)


@inner()
def rotate_row(given, start, cos, sin, output, output_start):
    """Rotate one head, given[start : start + width], and write it to `output` from output_start on. Every product and
    every sum is rounded to the dtype, as in torch.

    given, output: may be the same memory. cos, sin: [width].
    """
    half = len(cos) // 2
    whole = half // LANES * LANES
    _rotate_lanes(given, start, cos, sin, output, output_start, half, whole)
    for i in range(whole, half):
        left, right = load(given[start + i]), load(given[start + half + i])
        output[output_start + i] = _turned(output, left, cos[i], -right, sin[i])
        output[output_start + half + i] = _turned(output, right, cos[half + i], left, sin[half + i])


@inner()
def _turned(output, own, cos, other, sin):
    """Return own * cos + other * sin, rounded."""
    turned = load(as_stored(output, other * load(sin)))
    return as_stored(output, load(as_stored(output, own * load(cos))) + turned)


@intrinsic  # type: ignore[untyped-decorator]
def _rotate_lanes(typing_context, given, start, cos, sin, output, output_start, half, end):
    """Do what `rotate_row` does for the first `end` numbers of each half, LANES at a time."""
    load_lanes, is_bfloat = loader(given), given.dtype == types.uint16

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given_data, cos_data, sin_data, output_data = (
            array_data(context, builder, signature, args, i) for i in (0, 2, 3, 4)
        )
        start, output_start, half, end = args[1], *args[5:]
        step = start.type(LANES)
        with cgutils.for_range_slice(builder, start.type(0), end, step, start.type) as (i, _):
            places = i, builder.add(i, half)
            left, right = (load_lanes(builder, given_data, builder.add(start, each)) for each in places)
            for place, own, other in zip(places, (left, right), (builder.fneg(right), left), strict=True):
                turned = rounded(builder, builder.fmul(other, load_lanes(builder, sin_data, place)), is_bfloat)
                kept = rounded(builder, builder.fmul(own, load_lanes(builder, cos_data, place)), is_bfloat)
                at = builder.add(output_start, place)
                store_rounded(builder, builder.fadd(kept, turned), output_data, at, is_bfloat)
        return context.get_dummy_value()

    ints = [types.intp] * 3
    return types.void(given, types.intp, cos, sin, output, *ints), generate
