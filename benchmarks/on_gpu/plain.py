"""Plain decoding of a Llama with random weights, beside the time in which the device reads its weights, keys and
values, and beside transformers, with a static cache and torch.compile."""

from __future__ import annotations

import tempfile
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from attrs import frozen
from random_models import prompt
from transformers import PreTrainedModel, StaticCache, StoppingCriteria, StoppingCriteriaList

from on_gpu.decoding import decode
from on_gpu.limits import measure_limits
from on_gpu.models import llama_config, loading, random_llama, save_without_weights
from on_gpu.setup import Rows, Setup
from on_gpu.timing import attempt, free, said, synchronize
from specdec_core import LLM, Engine, Plugins, SamplingParams
from specdec_core.models.load import parse_dtype

COLUMNS = ("tokens_per_s", "ms_per_step", "limit_ms", "share_of_limit", "graph_share", "compiled")
ENGINE_S, TRANSFORMERS_S = 3.0, 35.0
"""What a cell takes at most, about: transformers has to compile."""
NUM_COMPILED = 12
"""Tokens that transformers generates before it is timed: with the first ones it compiles and captures graphs."""
ROOM, BLOCK_SIZE = 128, 16
"""Tokens after the context, and of a KV block."""


@frozen
class Reads:
    """What a step of plain decoding reads.

    weight_bytes: of all weights, but for the embedding, of which it reads few rows.
    kv_bytes_per_token: of all layers.
    """

    weight_bytes: float
    kv_bytes_per_token: float

    @classmethod
    def of(cls, setup: Setup) -> Reads:
        config, size = llama_config(setup.sizes.llama), parse_dtype(setup.dtype, torch.device(setup.device)).itemsize
        model = random_llama(setup.sizes.llama, "meta", "float32")
        table = model.get_input_embeddings().weight
        num_weights = sum(each.numel() for each in model.parameters() if each is not table)
        kv_size = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return cls(size * num_weights, size * kv_size)

    def bytes_of(self, batch: int, context: int) -> float:
        return self.weight_bytes + self.kv_bytes_per_token * batch * context


def figures(seconds: float, batch: int, num_bytes: float, bytes_per_s: float) -> dict[str, float]:
    """The results of a step that takes so many seconds and reads num_bytes, on a device that copies bytes_per_s."""
    return {
        "tokens_per_s": round(batch / seconds, 2),
        "ms_per_step": round(1e3 * seconds, 4),
        "limit_ms": round(1e3 * num_bytes / bytes_per_s, 4),
        "share_of_limit": round(num_bytes / bytes_per_s / seconds, 4),
    }


def rows(setup: Setup) -> Rows:
    bytes_per_s, reads = measure_limits(setup).bytes_per_s, Reads.of(setup)
    free()
    yield {"engine": "limits of the device", "gb_per_s": round(bytes_per_s / 1e9, 1)}
    yield from _of_specdec(setup, reads, bytes_per_s)
    free()
    yield from _of_transformers(setup, reads, bytes_per_s)


def _cells(setup: Setup, engine: str) -> list[dict[str, Any]]:
    """Those with the fewest tokens come first: the last ones may find no time or no memory."""
    both = sorted(product(setup.sizes.contexts, setup.sizes.batches), key=prod)
    return [{"engine": engine, "batch": batch, "context": context} for context, batch in both]


def _of_specdec(setup: Setup, reads: Reads, bytes_per_s: float) -> Rows:
    sizes, cells = setup.sizes, _cells(setup, "specdec")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "llama"
        save_without_weights(llama_config(sizes.llama), folder)
        try:
            with loading({str(folder): lambda: random_llama(sizes.llama, setup.device, setup.dtype)}):
                llm = LLM(
                    str(folder),
                    device=setup.device,
                    dtype=setup.dtype,
                    skip_tokenizer_init=True,
                    block_size=BLOCK_SIZE,
                    kv_manager="filled",
                    plugins=Plugins.load(modules=["on_gpu.filled_cache"]),
                    max_model_len=max(sizes.contexts) + ROOM,
                    max_num_seqs=max(sizes.batches),
                )
        except Exception as error:
            yield from ({**cell, "error": said(error)} for cell in cells)
            return
        with llm:
            for cell in cells:
                yield attempt(setup, cell, lambda cell=cell: _cell(llm, setup, cell, reads, bytes_per_s), ENGINE_S)


def _cell(llm: LLM, setup: Setup, cell: dict[str, Any], reads: Reads, bytes_per_s: float) -> dict[str, Any]:
    batch, context, sizes = cell["batch"], cell["context"], setup.sizes
    _check_room(llm.engine, batch, context)
    prompts = [prompt(context, i) for i in range(batch)]
    found = decode(llm.engine, [prompts], SamplingParams(temperature=0), sizes.plain_steps, sizes.warm_steps)
    seconds = found.seconds / found.num_steps
    return {**figures(seconds, batch, reads.bytes_of(batch, context), bytes_per_s), "graph_share": found.graph_share}


def _check_room(engine: Engine, batch: int, context: int) -> None:
    needed, there = batch * (context + ROOM), engine.kv.num_free_blocks * BLOCK_SIZE
    if needed > there:
        raise RuntimeError(f"the KV cache has room for {there} tokens, and {needed} are needed")


class Stamps(StoppingCriteria):
    """Stops nothing, and notes when each token is there."""

    def __init__(self, times: list[float]) -> None:
        self._note = times.append

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        synchronize()
        self._note(perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _of_transformers(setup: Setup, reads: Reads, bytes_per_s: float) -> Rows:
    cells = _cells(setup, "transformers")
    try:
        model = random_llama(setup.sizes.llama, setup.device, setup.dtype, attention="sdpa")
    except Exception as error:
        yield from ({**cell, "error": said(error)} for cell in cells)
        return
    needed_s = TRANSFORMERS_S if setup.device == "cuda" else 0
    for cell in cells:
        yield attempt(setup, cell, lambda cell=cell: _generate(model, setup, cell, reads, bytes_per_s), needed_s)


def _generate(
    model: PreTrainedModel, setup: Setup, cell: dict[str, Any], reads: Reads, bytes_per_s: float
) -> dict[str, Any]:
    batch, context = cell["batch"], cell["context"]
    num_tokens = NUM_COMPILED + setup.sizes.plain_steps
    num_bytes = reads.bytes_of(batch, context)
    if setup.device == "cuda" and num_bytes - reads.weight_bytes > 0.9 * torch.cuda.mem_get_info()[0]:
        raise RuntimeError(f"weights and KV cache take {num_bytes / 1e9:.0f} GB, and the device has less")
    torch.compiler.reset()
    times: list[float] = []
    ids = torch.tensor([prompt(context, i) for i in range(batch)], device=setup.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=StaticCache(config=model.config, max_cache_len=context + num_tokens),
        max_new_tokens=num_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([Stamps(times)]),
    )
    if len(times) != num_tokens:
        raise RuntimeError(f"it generated {len(times)} tokens in place of {num_tokens}")
    steps = [after - before for before, after in zip(times[NUM_COMPILED - 1 :], times[NUM_COMPILED:], strict=False)]
    is_compiled = getattr(model, "_compiled_call", None) is not None
    return {**figures(median(steps), batch, num_bytes, bytes_per_s), "compiled": is_compiled}
