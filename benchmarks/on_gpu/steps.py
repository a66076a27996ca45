"""Calls of CUDA in a step: how often the host waits for the device, and how many kernels it launches.

There are two target models: "tiny" is specdec's embedded model; "llama" has the shape of Llama 3 8B, random weights,
and a random EAGLE-3 head. The acceptance rate of a random head is near 0, so "llama" shows the cost of a step, not the
gain from drafts.

One process holds an engine for each method. The engines take turns, so that other load on the machine affects all. Only
decode steps are timed, and results are medians over the rounds. CUDA calls are counted in additional untimed steps,
since the profiler slows steps down. On a CPU the counts are null.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any

from attrs import evolve
from prompts import edit_prompts, plain_prompts
from random_models import prompt
from torch.profiler import profile, record_function

from on_gpu.cuda_calls import COUNTED, REGION, count_calls
from on_gpu.decoding import batches, decode, prefill
from on_gpu.models import llama_config, loading, random_llama, save_head, save_without_weights
from on_gpu.setup import MODEL_FREE, Rows, Setup
from on_gpu.timing import attempt, free, synchronize
from specdec_core import LLM, Engine, SamplingParams

METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", **MODEL_FREE["ngram"]},
    "eagle3": {"method": "eagle3", "adaptive_draft_length": False},
}
MODELS, TEMPERATURES = ("tiny", "llama"), (0.0, 1.0)
MAX_MODEL_LEN = 2048
BUILD_S, CELL_S = 8.0, 6.0
"""What an engine and a cell take at most, about."""
DRAFTED = "draft_tokens_per_counted_step"
NO_COUNTS = dict.fromkeys((DRAFTED, *COUNTED))
SPEEDS = ("tokens_per_s", "ms_per_step")
COLUMNS = (*SPEEDS, "speed_up", "acceptance_length", DRAFTED, *COUNTED, "graph_share", "num_speculative_tokens")


def rows(setup: Setup) -> Rows:
    for model in MODELS:
        yield from _of_model(setup, model)
        free()


def _of_model(setup: Setup, model: str) -> Rows:
    needed_s = (BUILD_S, CELL_S) if setup.device == "cuda" else (0, 0)
    llms: dict[str, LLM] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as closing:
        build = builder(model, setup, Path(name))
        for method in METHODS:
            row = attempt(
                setup, {"model": model, "method": method}, lambda m=method: _keep(llms, m, build), needed_s[0]
            )
            if method in llms:
                closing.callback(llms[method].close)
            else:
                yield row
        for batch, temperature in product(setup.sizes.step_batches, TEMPERATURES) if llms else ():
            cell = {"model": model, "batch": batch, "temperature": temperature}
            found: list[dict[str, Any]] = []
            row = attempt(setup, cell, lambda b=batch, t=temperature, f=found: _fill(f, llms, b, t, setup), needed_s[1])
            yield from ({**cell, **each} for each in found)
            if row != cell:  # it failed, or was skipped
                yield row


def _keep(llms: dict[str, LLM], method: str, build: Callable[[str], LLM]) -> dict[str, Any]:
    llms[method] = build(method)
    return {}


def _fill(found: list[dict[str, Any]], llms: Mapping[str, LLM], batch: int, temperature: float, setup: Setup) -> Any:
    found.extend(measure(llms, batch, temperature, setup))
    return {}


def builder(model: str, setup: Setup, folder: Path) -> Callable[[str], LLM]:
    """Return a function that builds the LLM of a method.

    model: "tiny" for the embedded model, or "llama" for a Llama with random weights and a random EAGLE-3 head.
    folder: where the head is saved.
    """
    shape, path = setup.sizes.llama, str(folder / "llama")
    if model == "llama":
        save_without_weights(llama_config(shape), Path(path))
        save_head(Path(path) / "drafts" / "eagle3", shape, setup.device)  # the method's default folder
        free()

    def build(method: str) -> LLM:
        with loading({path: lambda: random_llama(shape, setup.device, setup.dtype)}):
            return LLM(
                path if model == "llama" else model,
                device=setup.device,
                dtype=setup.dtype,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=max(setup.sizes.step_batches),
                speculative_config=METHODS[method],
                skip_tokenizer_init=model == "llama",
            )

    return build


def measure(llms: Mapping[str, LLM], batch: int, temperature: float, setup: Setup) -> Rows:
    """Measure all methods on the same prompts, and yield a row of results for each method. llms: by the method."""
    sizes, params = setup.sizes, SamplingParams(temperature=temperature, seed=0)
    prompts = prompts_for(next(iter(llms.values())), max(batch, 2), sizes.prompt_tokens)  # to edit, and to continue
    groups = batches(prompts, batch)
    for llm in llms.values():
        decode(llm.engine, groups, params, sizes.timed_steps, sizes.warm_steps)  # captures graphs of all sizes
    rounds = [
        {name: decode(llm.engine, groups, params, sizes.timed_steps, sizes.warm_steps) for name, llm in llms.items()}
        for _ in range(sizes.step_rounds)
    ]
    for name, llm in llms.items():
        is_counted = setup.device == "cuda"
        counts = profile_run(llm.engine, groups[0], params, sizes.counted_steps) if is_counted else NO_COUNTS
        own = [each[name] for each in rounds]
        speed_ups = [each[name].tokens_per_s / each["plain"].tokens_per_s for each in rounds if "plain" in each]
        yield {
            "method": name,
            "num_speculative_tokens": llm.engine.num_speculative_tokens,
            **{key: round(median(getattr(each, key) for each in own), 3) for key in SPEEDS},
            "speed_up": round(median(speed_ups), 3) if speed_ups else None,
            "acceptance_length": round(median(each.acceptance_length for each in own), 3),
            "tokens_per_s_of_each_round": [round(each.tokens_per_s, 3) for each in own],
            "graph_share": own[-1].graph_share,
            **counts,
        }


def profile_run(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, num_steps: int
) -> dict[str, Any]:
    # None ends too early.
    request_ids = prefill(engine, prompts, evolve(params, max_tokens=MAX_MODEL_LEN // 2, ignore_eos=True))
    for _ in range(num_steps):  # until proposers have context to draft from
        engine.step()
    with profile(acc_events=True) as profiler:  # else torch 2.11 warns
        with record_function(REGION):
            num_draft_tokens = sum(engine.step().num_draft_tokens for _ in range(num_steps))
        synchronize()
    engine.cancel(*request_ids)
    return {DRAFTED: num_draft_tokens / num_steps, **count_calls(profiler.events(), num_steps)}


def prompts_for(llm: LLM, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Return the token ids of prompts that are alternately code to edit and code to continue.

    num_tokens: maximum number of tokens per prompt.
    If the LLM has no tokenizer, the token ids are arbitrary.
    """
    if (tokenizer := llm.get_tokenizer()) is None:
        return [prompt(num_tokens, i) for i in range(num_prompts)]
    texts = cycle(chain.from_iterable(zip(edit_prompts().values(), plain_prompts().values(), strict=True)))
    return [tokenizer.encode(text)[-num_tokens:] for text in islice(texts, num_prompts)]
