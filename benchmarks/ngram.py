"""n-gram speculation against plain decoding: on code to edit, whose completion repeats the prompt, and on code to go on
with, greedily and sampled at temperature 1, which repeats least.

    python benchmarks/ngram.py                     # writes benchmarks/results/ngram.json and ngram.png
    python benchmarks/ngram.py --prompts FILE      # {"id", "prompt"} a line, reported beside the built-in prompts

Each round runs every prompt plain and then with each setting, one request at a time, so that drift of the machine falls
on both sides of a pair alike. Reported are medians over the rounds of the ratio within a pair.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from attrs import frozen
from prompts import edit_prompts, plain_prompts, read_prompts

from specdec_core import LLM, SamplingParams
from specdec_core.outputs import RequestOutput

RESULTS = Path(__file__).parent / "results"
DISTRIBUTIONS = ("specdec-core", "specdec-kernels", "specdec-proposer-ngram")
HEADLINE = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5}


@frozen
class Run:
    seconds: float
    output: RequestOutput


def complete(llm: LLM, prompt: str, params: SamplingParams) -> Run:
    started = time.perf_counter()
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return Run(time.perf_counter() - started, output)


def measure(
    plain: LLM, speculating: dict[str, LLM], prompts: dict[str, str], params: SamplingParams, rounds: int
) -> dict[str, Any]:
    """{setting: figures} over all prompts."""
    pairs: dict[str, dict[str, list[tuple[Run, Run]]]] = {name: {p: [] for p in prompts} for name in speculating}
    for round_ in range(rounds + 1):  # the first one warms up
        for prompt_name, prompt in prompts.items():
            for setting, llm in speculating.items():
                pair = complete(plain, prompt, params), complete(llm, prompt, params)
                if round_ > 0:
                    pairs[setting][prompt_name].append(pair)
    return {setting: figures(by_prompt) for setting, by_prompt in pairs.items()}


def figures(by_prompt: dict[str, list[tuple[Run, Run]]]) -> dict[str, Any]:
    def per_second(runs: list[Run]) -> float:
        return median(len(run.output.outputs[0].token_ids) / run.seconds for run in runs)

    prompts = {}
    for name, pairs in by_prompt.items():
        plain, speculative = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        prompts[name] = {
            "num_tokens": len(plain[0].output.outputs[0].token_ids),
            "plain_tokens_per_s": round(per_second(plain), 1),
            "speculative_tokens_per_s": round(per_second(speculative), 1),
            "speed_up": round(median(a.seconds / b.seconds for a, b in pairs), 3),
            "acceptance_length": round(speculative[0].output.speculation.acceptance_length, 3),
            "num_drafts": speculative[0].output.speculation.num_drafts,
            "identical": all(a.output.outputs[0].token_ids == b.output.outputs[0].token_ids for a, b in pairs),
        }
    return {
        "median_speed_up": round(median(p["speed_up"] for p in prompts.values()), 3),
        "lowest_speed_up": min(p["speed_up"] for p in prompts.values()),
        "median_acceptance_length": round(median(p["acceptance_length"] for p in prompts.values()), 3),
        "all_identical": all(p["identical"] for p in prompts.values()),
        "prompts": prompts,
    }


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.machine()


def machine() -> dict[str, Any]:
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numba", *DISTRIBUTIONS)},
    }


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.32 * sum(len(r["headline"]["prompts"]) for r in results.values()) + 1.2))
    names, values, colours = [], [], []
    for colour, (kind, settings) in zip(
        ("tab:blue", "tab:gray", "tab:olive", "tab:green"), results.items(), strict=False
    ):
        for name, prompt in settings["headline"]["prompts"].items():
            names.append(f"{kind}: {name}")
            values.append(prompt["speed_up"])
            colours.append(colour)
    axes.barh(names[::-1], values[::-1], color=colours[::-1])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("speed-up over plain decoding, one request at a time")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--most-prompts", type=int, default=20, help="of --prompts")
    parser.add_argument("--out", type=Path, default=RESULTS / "ngram.json")
    args = parser.parse_args()

    greedy = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    sampled = SamplingParams(temperature=1.0, seed=0, max_tokens=args.max_tokens)
    kinds = {
        "edit": (edit_prompts(), greedy),
        "go on": (plain_prompts(), greedy),
        "go on, sampled": (plain_prompts(), sampled),
    }
    if args.prompts:
        kinds["file"] = (dict(list(read_prompts(args.prompts).items())[: args.most_prompts]), greedy)
    settings = {"headline": HEADLINE}
    plain = LLM(args.model)
    speculating = {name: LLM(args.model, speculative_config=config) for name, config in settings.items()}
    results = {
        kind: measure(plain, speculating, prompts, params, args.rounds) for kind, (prompts, params) in kinds.items()
    }

    args.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": shlex.join(["python", "benchmarks/ngram.py", *sys.argv[1:]]),
        "model": args.model,
        "dtype": str(plain.engine.target.info.dtype),
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
        "machine": machine(),
        "settings": settings,
        "results": results,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plot(results, args.out.with_suffix(".png"))
    for kind, by_setting in results.items():
        for name, figure in by_setting.items():
            print(
                f"{kind:14} {name:22} speed-up {figure['median_speed_up']:.2f} "
                f"(lowest {figure['lowest_speed_up']:.2f}) acceptance length "
                f"{figure['median_acceptance_length']:.2f} identical {figure['all_identical']}"
            )


if __name__ == "__main__":
    main()
