"""How much memory CUDA graphs take, before there are any."""

from __future__ import annotations

import torch

from specdec_core.models.graph_inputs import NUM_TOKENS

ACTIVATIONS = 16
"""Tensors of the size of a step's hidden states that a decoder layer has at once, where the model's own number is not
known. Its MLP's make up most of them."""
NUM_KINDS = 2
"""Kinds of calls with CUDA graphs of their own: with trees and without."""


def graph_bytes(kept_bytes: int, activation_bytes: int) -> int:
    """Return the most bytes that a function's CUDA graphs take, for the memory plan.

    kept_bytes: of the function's inputs and results, for a token. Every graph keeps its own.
    activation_bytes: of all else that there is at once, for a token. Graphs share this memory.
    """
    return NUM_KINDS * (sum(NUM_TOKENS) * kept_bytes + NUM_TOKENS[-1] * activation_bytes)


def head_graph_bytes(width: int, num_kept: int, dtype: torch.dtype) -> int:
    """Return the most bytes that the CUDA graphs of a draft head take, for `Plan.graph_bytes`.

    width: of its hidden states.
    num_kept: how many tensors [n, width] the functions given to `BuildContext.graphed` take and return.
    """
    row_bytes = width * dtype.itemsize
    return graph_bytes(num_kept * row_bytes, ACTIVATIONS * row_bytes)
