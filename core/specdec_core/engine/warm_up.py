"""Forward passes while the engine is built: operations are compiled and memory is allocated then, not in the first
request. What is timed is a usual forward pass: on a GPU, one that a CUDA graph replays."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from specdec_core.contracts.kv import KVMetadata, Visibility
from specdec_core.models import Model
from specdec_core.models.graphed import ForwardGraphs
from specdec_core.models.graphs import NUM_CHECKS
from specdec_core.models.recurrent import Chunk, Level, StatePlan
from specdec_core.ops.upload import upload

PROMPT = 64
RUNS = 2
"""Of the prompt: the first one may compile, and other processes may slow one down."""


def warm_up(target: Model, num_blocks: int, block_size: int) -> float:
    """Run the target on one token and on a prompt, which operations may compute in other ways. Their keys and values
    are in the first blocks, which no request holds yet.

    num_blocks, block_size: of the KV cache.

    Returns the seconds that each token of the prompt took, once all is compiled.
    """
    num_tokens = min(PROMPT, target.info.max_model_len, num_blocks * block_size)
    _run(target, 1, block_size)

    def seconds(turn: int) -> float:
        started = perf_counter()
        _run(target, num_tokens, block_size, turn % target.info.vocab_size)
        if target.info.device.type == "cuda":
            torch.cuda.synchronize(target.info.device)
        return perf_counter() - started

    until_replayed(target.graphs, seconds)
    return min(seconds(0) for _ in range(RUNS)) / num_tokens


def until_replayed(graphs: ForwardGraphs | None, run: Callable[[int], object]) -> None:
    """Run a forward pass until a CUDA graph replays it, or it turns out that none will. Without graphs, it is not run.

    run: gets the turn, and waits for the device. It must compute other inputs in each turn: a graph is used only after
        it was right for several inputs.
    """
    if graphs is None:
        return
    for turn in range(1, NUM_CHECKS + 3):  # the first one may capture, and the last one replays
        tried = graphs.graphs.num_tried
        run(turn)
        if graphs.graphs.num_tried == tried:
            return


@torch.inference_mode()
def _run(target: Model, num_tokens: int, block_size: int, token_id: int = 0) -> None:
    num_padded, device = target.attention.padded(num_tokens), target.info.device
    positions = torch.zeros(num_padded, dtype=torch.int64, device=device)
    positions[:num_tokens] = torch.arange(num_tokens, device=device)
    metadata = KVMetadata(
        starts=(0,),
        lengths=(num_tokens,),
        block_tables=torch.arange(-(-num_tokens // block_size), device=device).unsqueeze(0),
        slot_mapping=positions[:num_tokens],
        block_size=block_size,
    )
    states = None
    if target.recurrent is not None:  # in the first slot, which no request holds yet, and which is cleared for one
        one = Level(upload([0], device), upload([0], device), 1)
        states = StatePlan((), one) if num_tokens == 1 else StatePlan((Chunk(0, num_tokens, 0),), None)
    token_ids, seen = torch.full_like(positions, token_id), Visibility(positions, positions + 1)
    target.forward(token_ids, positions, metadata, seen, upload([num_tokens - 1], device), states=states)
