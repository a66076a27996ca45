"""Measures how well the budget of a step estimates the acceptance of draft tokens, on held-out code.

    python benchmarks/calibration.py [--only METHOD]     # writes benchmarks/results/calibration.json and .png

For each method and temperature: the expected calibration error over bins of equally many draft tokens, whose parents
were accepted, and in each bin the mean estimate beside the share that was accepted (plotted, too). Requests draft in
every step, as if drafts cost nothing: else only the good ones would count.
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import heldout
import numpy as np
from measuring import RESULTS, command, machine, write

from specdec_core import LLM, SamplingParams

CHOSEN = {"draft_sample_method": "greedy"}  # where they would be drawn, above temperature 0
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {},
    "draft_model": {},
    "draft_model, chosen": CHOSEN,
    "eagle": {},
    "eagle3": {},
    "eagle3, chosen": CHOSEN,
    "mtp": {},
    "mlp_speculator": {},
    "medusa": {},
}
NUM_BINS = 10
BATCH = 8


def measure(method: str, options: dict[str, Any], temperature: float, num_nodes: int) -> dict[str, Any]:
    """Generate until the acceptance of num_nodes draft tokens was estimated."""
    estimates: list[np.ndarray] = []
    outcomes: list[np.ndarray] = []

    def watch(estimated: np.ndarray, is_accepted: np.ndarray) -> None:
        estimates.append(estimated)
        outcomes.append(is_accepted)

    config = {"method": method.partition(",")[0], "adaptive_draft_length": True, **options}
    prompts = cycle(heldout.texts())
    params = SamplingParams(temperature=temperature, max_tokens=128, ignore_eos=True)
    with LLM("tiny", speculative_config=config, max_num_seqs=BATCH, disable_log_stats=True) as llm:
        (drafter,) = llm.engine._speculation.drafters
        budget = drafter.budget
        assert budget is not None
        budget.survival.watch = watch
        budget._choose = lambda rows, limits, so_far: limits  # type: ignore[method-assign]
        seconds, nothing = np.ones_like(budget._curve.seconds(1)), lambda *of: None
        budget._curve.seconds = lambda num_requests, seconds=seconds: seconds  # type: ignore[method-assign,misc]
        budget._curve.add = budget._curve.add_empty = nothing  # type: ignore[method-assign]
        while sum(map(len, estimates)) < num_nodes:
            llm.generate(list(islice(prompts, BATCH)), params, use_tqdm=False)
    estimated, is_accepted = np.concatenate(estimates), np.concatenate(outcomes)
    bins = np.array_split(estimated.argsort(kind="stable"), NUM_BINS)
    pairs = [(float(estimated[each].mean()), float(is_accepted[each].mean())) for each in bins]
    sizes = np.array([len(each) for each in bins]) / len(estimated)
    return {
        "num_nodes": len(estimated),
        "expected_calibration_error": round(float(np.dot(sizes, [abs(a - b) for a, b in pairs])), 4),
        "bins": [{"estimated": round(a, 4), "accepted": round(b, 4)} for a, b in pairs],
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a reliability diagram: the share of accepted draft tokens over the estimate, by method and temperature."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True)
    for axes, temperature in zip(panels, (0.0, 1.0), strict=True):
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)
        for row in (row for row in rows if row["temperature"] == temperature):
            points = [(each["estimated"], each["accepted"]) for each in row["bins"]]
            label = f"{row['method']} ({row['expected_calibration_error']:.3f})"
            axes.plot(*zip(*points, strict=True), marker=".", linewidth=1, label=label)
        axes.set(title=f"temperature {temperature:g}", xlabel="estimated probability of acceptance")
        axes.legend(fontsize=7, title="(expected calibration error)", title_fontsize=7)
        axes.grid(visible=True, alpha=0.25)
    panels[0].set_ylabel("share accepted")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="methods with this in their names")
    parser.add_argument("--num-nodes", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "calibration.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("calibration.py"), "machine": machine(), "rows": []}
    for method, options in METHODS.items():
        temperatures = (1.0,) if options is CHOSEN else (0.0, 1.0)
        for temperature in temperatures if args.only in method else ():
            found = measure(method, options, temperature, args.num_nodes)
            print(method, temperature, found["expected_calibration_error"], flush=True)
            record["rows"].append({"method": method, "temperature": temperature, **found})
            write(record, args.out)
    plot(record["rows"], args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
