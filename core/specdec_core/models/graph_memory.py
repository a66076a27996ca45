"""How much memory CUDA graphs take, before there are any."""

from __future__ import annotations

import torch

from specdec_core.contracts.target import TargetInfo
from specdec_core.models.graph_buffers import NUM_TOKENS
from specdec_core.models.graph_inputs import power_of_2

ACTIVATIONS = 16
"""Tensors of the size of a step's hidden states that a decoder layer has at once, where the model's own number is not
known. Its MLP's make up most of them."""
MOST_GRAPHS = 64
"""Graphs of a function: sizes, kinds of trees, and values that it depends on. Further ones are not captured."""
OBJECT_BYTES = 2**20
"""Of a graph itself, in the driver: an allowance for its kernels' arguments."""
POOL_PARTS = 2
"""The memory in which graphs compute, in multiples of what the largest takes: smaller graphs use parts of it, but what
was captured before the largest may lie beside it."""
NUM_INTEGERS = 8
"""Token ids, positions and the like, of each token."""
PART_KEYS, PARTIAL_BYTES = 256, 2**28
"""Attention on a GPU may sum the keys in parts, of no fewer keys, whose results take no more memory."""


def graph_bytes(kept_bytes: int, activation_bytes: int) -> int:
    """Return the most bytes that a function's CUDA graphs take, for the memory plan. Attention takes more: see
    `attention_graph_bytes`.

    kept_bytes: of the function's inputs and results, for a token. Graphs share the buffers.
    activation_bytes: of all else that there is at once, for a token. Graphs share this memory, too.
    """
    per_token = kept_bytes + NUM_INTEGERS * torch.int64.itemsize + POOL_PARTS * activation_bytes
    return NUM_TOKENS[-1] * per_token + MOST_GRAPHS * OBJECT_BYTES


def attention_graph_bytes(info: TargetInfo, block_size: int, num_speculative_tokens: int) -> int:
    """Return the most bytes that attention takes in a function's CUDA graphs: its inputs, of which graphs share the
    buffers, and partial results.

    info: of the target. num_speculative_tokens: the most draft tokens of a request.
    """
    num_slots = info.max_model_len + num_speculative_tokens
    max_blocks = power_of_2(2 * -(-num_slots // block_size))
    # Narrower tables, and shorter paths, have buffers of their own: together they are no larger than the largest.
    tables = 2 * max_blocks * torch.int64.itemsize + max_blocks * torch.int32.itemsize
    paths = 2 * power_of_2(1 + num_speculative_tokens) * torch.int64.itemsize
    num_parts = -(-max_blocks * block_size // PART_KEYS)
    partial = num_parts * 2 * info.hidden_size * torch.float32.itemsize if num_parts > 1 else 0
    return NUM_TOKENS[-1] * (tables + paths + NUM_INTEGERS * torch.int64.itemsize) + min(
        NUM_TOKENS[-1] * partial, PARTIAL_BYTES
    )


def head_graph_bytes(width: int, num_kept: int, dtype: torch.dtype, num_functions: int = 1) -> int:
    """Return the most bytes that the CUDA graphs of a draft head take, for `Plan.graph_bytes`. What its attention takes
    is added where the plan has a kv_layout.

    width: of its hidden states.
    num_kept: how many tensors [n, width] a function given to `BuildContext.graphed` takes and returns, at most.
    num_functions: how many functions are given to it. They share the buffers.
    """
    row_bytes = width * dtype.itemsize
    more_graphs = (num_functions - 1) * MOST_GRAPHS * OBJECT_BYTES
    return graph_bytes(num_kept * row_bytes, ACTIVATIONS * row_bytes) + more_graphs
