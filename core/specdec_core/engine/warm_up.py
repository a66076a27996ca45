"""Forward passes while the engine is built: operations are compiled and memory is allocated then, not in the first
request."""

from __future__ import annotations

import torch

from specdec_core.contracts.kv import KVManager, Visibility
from specdec_core.models import Model

REQUEST, PROMPT = "warm-up", 64


def warm_up(target: Model, kv: KVManager, block_size: int) -> None:
    """Run the target on one token and on a prompt, which operations may compute in other ways, in a KV cache that no
    request uses yet. Leaves out a length for which the cache is too small."""
    for num_tokens in (1, PROMPT):
        num_tokens = min(num_tokens, target.info.max_model_len)
        if num_tokens <= kv.num_free_blocks * block_size:
            _run(target, kv, num_tokens)


@torch.inference_mode()
def _run(target: Model, kv: KVManager, num_tokens: int) -> None:
    num_padded, device = target.attention.padded(num_tokens), target.info.device
    positions = torch.zeros(num_padded, dtype=torch.int64, device=device)
    positions[:num_tokens] = torch.arange(num_tokens, device=device)
    kv.admit(REQUEST, positions[:0].cpu().numpy(), "", ())
    try:
        kv.reserve(REQUEST, num_tokens, 0)
        metadata = kv.metadata([REQUEST], [0], [num_tokens])
        visibility = Visibility(positions, positions + 1)
        last = torch.tensor([num_tokens - 1], device=device)
        target.forward(torch.zeros_like(positions), positions, metadata, visibility, last)
    finally:
        kv.release(REQUEST)
