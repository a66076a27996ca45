"""Captures the CUDA graphs of a model's forward passes while the engine is built, so that no request waits for it."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen

from specdec_core.contracts.kv import KVMetadata, Visibility
from specdec_core.models.graph_buffers import NUM_TOKENS
from specdec_core.models.graphs import NUM_CHECKS
from specdec_core.models.model import Model
from specdec_core.ops.upload import upload

PER_REQUEST = 16
"""Tokens of a request in these forward passes."""


@frozen
class Expected:
    """The forward passes to come.

    most_tokens: the most tokens of one without prompts.
    max_model_len: of the requests.
    num_blocks, block_size: of the KV cache.
    window: of all layers.
    """

    most_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    window: int | None = None


@torch.inference_mode()
def capture_ahead(model: Model, expected: Expected) -> None:
    """Run forward passes of every size that has a graph, as often as it takes until the graphs are used. Larger ones
    come first: the others compute in their memory. Keys and values are in the first blocks, which no request holds
    yet."""
    if model.graphs is None:
        return
    graphs = model.graphs.graphs
    graphs.allow_length(expected.max_model_len)
    needed = [
        size for size, smaller in zip(NUM_TOKENS, (0, *NUM_TOKENS), strict=False) if smaller < expected.most_tokens
    ]
    for size in reversed(needed):
        for start in range(1 + NUM_CHECKS):  # a graph is trusted for other inputs only
            if not graphs.is_off and model.attention.padded(size) == size:
                _run(model, expected, size, start)


def _run(model: Model, expected: Expected, size: int, start: int) -> None:
    """Run a forward pass of requests that have `start` tokens in the KV cache, of forward passes before. Does nothing
    if the KV cache is too small."""
    per_request = min(PER_REQUEST, expected.max_model_len - NUM_CHECKS)
    if per_request < 1:
        return
    num_requests, num_blocks = -(-size // per_request), -(-(per_request + NUM_CHECKS) // expected.block_size)
    if num_requests * num_blocks > expected.num_blocks:
        return
    device, tokens = model.info.device, np.arange(size)
    positions = start + tokens % per_request
    slots = tokens // per_request * num_blocks * expected.block_size + positions
    metadata = KVMetadata(
        starts=(start,) * num_requests,
        lengths=tuple(np.bincount(tokens // per_request).tolist()),
        block_tables=upload(np.arange(num_requests * num_blocks).reshape(num_requests, -1), device),
        slot_mapping=upload(slots, device),
        block_size=expected.block_size,
    )
    token_ids, at = upload((tokens + start) % model.info.vocab_size, device), upload(positions, device)
    rows, seen = upload(tokens, device), Visibility(at, at + 1)
    model.forward(token_ids, at, metadata, seen, rows, window=expected.window)
