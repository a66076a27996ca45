"""Functions that time speculative against plain decoding end to end, shared by several benchmarks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from attrs import frozen
from measuring import RESULTS

from specdec_core import LLM, SamplingParams
from specdec_core.api.outputs import RequestOutput


def arguments(description: str | None, result: str) -> argparse.ArgumentParser:
    """Make an argument parser with the options that all end-to-end benchmarks share.

    description: the text that --help shows.
    result: name of the file in benchmarks/results to which results are written by default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS / result)
    return parser


def ways_to_sample(max_tokens: int) -> tuple[SamplingParams, SamplingParams]:
    """Return two sets of sampling parameters: for greedy decoding, and for sampling at temperature 1."""
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return greedy, SamplingParams(temperature=1.0, seed=0, max_tokens=max_tokens)


@frozen
class Run:
    seconds: float
    output: RequestOutput


def complete(llm: LLM, prompt: str, params: SamplingParams) -> Run:
    started = time.perf_counter()
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return Run(time.perf_counter() - started, output)


def measure(
    plain: LLM, renew: Callable[[], dict[str, LLM]], prompts: dict[str, str], params: SamplingParams, rounds: int
) -> dict[str, Any]:
    """Time each prompt with plain decoding and with every speculative configuration.

    plain: the LLM without speculation.
    renew: called at the start of every round. It returns the LLMs to measure, {name of the configuration: LLM}. It may
        return the same LLMs again, unless they keep something between requests, such as a cache of outputs.
    prompts: {name of the prompt: text}.
    rounds: number of timed rounds. One more round before them warms up.
    Returns {name of the configuration: its results}.
    """
    pairs: dict[str, dict[str, list[tuple[Run, Run]]]] = {}
    for round_ in range(rounds + 1):  # the first one warms up
        speculating = renew()
        for prompt_name, prompt in prompts.items():
            for setting, llm in speculating.items():
                pair = complete(plain, prompt, params), complete(llm, prompt, params)
                if round_ > 0:
                    pairs.setdefault(setting, {}).setdefault(prompt_name, []).append(pair)
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


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.32 * sum(len(r["headline"]["prompts"]) for r in results.values()) + 1.2))
    names, values, colors = [], [], []
    for color, (kind, settings) in zip(
        ("tab:blue", "tab:gray", "tab:olive", "tab:green"), results.items(), strict=False
    ):
        for name, prompt in settings["headline"]["prompts"].items():
            names.append(f"{kind}: {name}")
            values.append(prompt["speed_up"])
            colors.append(color)
    axes.barh(names[::-1], values[::-1], color=colors[::-1])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("speed-up over plain decoding, one request at a time")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def say(results: dict[str, Any]) -> None:
    for kind, by_setting in results.items():
        for name, figure in by_setting.items():
            print(
                f"{kind:14} {name:22} speed-up {figure['median_speed_up']:.2f} "
                f"(lowest {figure['lowest_speed_up']:.2f}) acceptance length "
                f"{figure['median_acceptance_length']:.2f} identical {figure['all_identical']}"
            )
