"""Measures the default settings of a method beside fixed numbers of draft tokens.

    python benchmarks/fixed_numbers.py     # writes benchmarks/results/fixed_numbers.json

In each round of a cell, the same prompts are decoded plainly, with default settings and with each fixed number, in
turn. A figure is the median of the ratios of tokens per second to those of plain decoding in the same
round; `of_best` is the median ratio of the default to the fixed number with the highest median.
"""

from __future__ import annotations

import argparse
import random
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from default_settings import METHODS, num_prompts, prompts_of
from interleaved import Timed, run_interleaved
from measuring import RESULTS, command, machine, write

from specdec_core import LLM
from specdec_tools.tune import NUMBERS

NAMES = ("ngram", "eagle3")
KINDS, TEMPERATURES, BATCHES = ("code", "text"), (0.0, 1.0), (1, 8, 64)
PLAIN, DEFAULT = "plain", "default"


def configs_of(method: str) -> dict[str, Any]:
    """The speculative_config of each engine, by name."""
    config = {"method": method, **METHODS[method]}
    fixed = {str(number): {**config, "num_speculative_tokens": number} for number in NUMBERS}
    return {PLAIN: None, DEFAULT: config, **fixed}


def measure(llms: dict[str, LLM], cell: dict[str, Any], rounds: int, max_tokens: int) -> dict[str, Any]:
    batch_size = cell["batch_size"]
    prompts = prompts_of(cell["prompts"], num_prompts(batch_size), llms[PLAIN])

    draws = random.Random(0)

    def run() -> dict[str, Timed]:
        return run_interleaved(llms, prompts, cell["temperature"], batch_size, max_tokens, draws)

    run()  # to warm up
    ratios: dict[str, list[float]] = {name: [] for name in llms}
    for _ in range(rounds):
        found = run()
        for name, timed in found.items():
            ratios[name].append(timed.tokens_per_s / found[PLAIN].tokens_per_s)
    medians = {name: median(of_one) for name, of_one in ratios.items() if name != PLAIN}
    best = max((name for name in medians if name != DEFAULT), key=medians.__getitem__)
    pairs = zip(ratios[DEFAULT], ratios[best], strict=True)
    return {
        **cell,
        "speed_up": {name: round(ratio, 3) for name, ratio in medians.items()},
        "best": int(best),
        "of_best": round(median(default / fixed for default, fixed in pairs), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--only", nargs="+", default=NAMES, metavar="METHOD")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "fixed_numbers.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("fixed_numbers.py"), "machine": machine(), "rows": []}
    for method in args.only:
        with ExitStack() as closing:
            llms = {
                name: closing.enter_context(LLM(args.model, speculative_config=config))
                for name, config in configs_of(method).items()
            }
            cells = [*product(args.kinds, TEMPERATURES, args.batches)]
            random.Random(method).shuffle(cells)
            for kind, temperature, batch_size in cells:
                cell = {"method": method, "prompts": kind, "temperature": temperature, "batch_size": batch_size}
                row = measure(llms, cell, args.rounds, args.max_tokens)
                print(*cell.values(), row["of_best"], row["best"], row["speed_up"], flush=True)
                record["rows"].append(row)
                write(record, args.out)
    record["lowest"] = min(row["of_best"] for row in record["rows"])
    write(record, args.out)


if __name__ == "__main__":
    main()
