"""What kernels are measured on."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from attrs import frozen

from on_gpu.setup import Sizes
from specdec_core.contracts.kv import KVMetadata, Visibility
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.padding import Padding

DTYPE, SIZE = torch.bfloat16, 2  # of weights and hidden states, in bytes
BLOCK_SIZE = 16
Operation = Callable[..., Any]
Bound = Callable[[], Any]


@frozen
class Case:
    """An operation on given sizes.

    sizes: what the output shows.
    num_bytes, num_flops: what the operation must read and write, and compute.
    bind: returns a function that binds an implementation of the operation to arguments. It allocates these. What the
        bound function returns is compared.
    tolerance: the largest relative error of the operation; None: that of the dtype of its results.
    """

    sizes: dict[str, Any]
    num_bytes: float
    num_flops: float
    bind: Callable[[], Callable[[Operation], Bound]]
    tolerance: float | None = None


def heads_of(sizes: Sizes) -> tuple[int, int, int]:
    shape = sizes.kernel_shape
    return shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]


def random(*shape: int, device: str) -> torch.Tensor:
    numbers = torch.randn(shape, dtype=torch.float32 if prod(shape) < 2**28 else DTYPE, device=device)
    return numbers.to(DTYPE)


def cache_of(
    sizes: Sizes, batch: int, context: int, rows: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, AttentionPlan]:
    """Random keys and values of one layer, in blocks in random order, and the plan of a forward pass over the last
    `rows` tokens of each request, which is a chain."""
    _, num_kv_heads, dim = heads_of(sizes)
    num_blocks = -(-context // BLOCK_SIZE)
    order = torch.randperm(batch * num_blocks, generator=torch.Generator().manual_seed(0))
    tables = order.view(batch, num_blocks).to(device)
    positions = torch.arange(context - rows, context, device=device).repeat(batch)
    requests = torch.arange(batch, device=device).repeat_interleave(rows)
    slots = tables[requests, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    metadata = KVMetadata((context - rows,) * batch, (rows,) * batch, tables, slots, BLOCK_SIZE)
    plan = AttentionPlan(metadata, Visibility(positions, positions + 1), Padding.of(torch.device(device)))
    keys, values = (random(batch * num_blocks * BLOCK_SIZE + 1, num_kv_heads, dim, device=device) for _ in range(2))
    return keys, values, plan
