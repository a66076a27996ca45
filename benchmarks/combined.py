"""Compares two methods that draft together with each of them alone.

    python benchmarks/combined.py     # writes benchmarks/results/combined.json
    python benchmarks/combined.py --times 6 --out benchmarks/results/combined_deep.json

With a fixed number of draft tokens, the same for all three: tokens per forward pass, which depend on no clock. With
default settings: tokens per second, in turn with plain decoding. The prompts are of one kind, or a mix of all kinds.
--times gives the target that many times as many layers, and the same logits (inflate.py): drafting then costs as little
beside a forward pass as it does for a larger model.
"""

from __future__ import annotations

import argparse
import random
from contextlib import ExitStack
from itertools import chain, islice, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from default_settings import METHODS, texts_of
from inflate import deeper
from interleaved import Timed, run_interleaved
from measuring import RESULTS, command, machine, write

from specdec_core import LLM

FIRST, SECOND = "suffix", "eagle3"
BOTH, PLAIN, MIX = "both", "plain", "mix"
KINDS = ("code", "edits", "text")
TEMPERATURES, BATCHES = (0.0, 1.0), (1, 8)
NUM_PROMPTS = 16
NUM_FIXED = 8
"""Draft tokens of a request in a step."""


def texts(kind: str) -> list[str]:
    if kind != MIX:
        return [*islice(texts_of(kind), NUM_PROMPTS)]
    return [*islice(chain.from_iterable(zip(*map(texts_of, KINDS), strict=False)), NUM_PROMPTS)]


def build(model: str, closing: ExitStack, **options: Any) -> dict[str, LLM]:
    """The engines of both methods, of each alone, and without speculation."""
    configs = {name: {"method": name, **METHODS[name], **options} for name in (FIRST, SECOND)}
    every = {PLAIN: None, **configs, BOTH: [*configs.values()]}
    return {name: closing.enter_context(LLM(model, speculative_config=each)) for name, each in every.items()}


def measure(
    llms: dict[str, LLM], cell: dict[str, Any], rounds: int, max_tokens: int, draws: random.Random
) -> list[dict[str, Timed]]:
    """What each engine did in each round."""
    tokenizer = llms[PLAIN].get_tokenizer()
    prompts = [tokenizer.encode(text) for text in texts(cell["prompts"])]
    run = cell["temperature"], cell["batch_size"], max_tokens, draws
    return [run_interleaved(llms, prompts, *run) for _ in range(rounds + 1)][1:]  # the first is to warm up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fixed-rounds", type=int, default=5, help="0: no fixed number")
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, MIX), default=(*KINDS, MIX))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS / "combined.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("combined.py"), "machine": machine(), "rows": []}
    record |= {"methods": [FIRST, SECOND], "num_speculative_tokens": NUM_FIXED, "max_tokens": args.max_tokens}
    record["times"] = args.times
    with deeper(args.model, args.times) as model:
        if args.fixed_rounds:
            measure_all(record, args, model, is_fixed=True)
        measure_all(record, args, model, is_fixed=False)


def measure_all(record: dict[str, Any], args: argparse.Namespace, model: str, *, is_fixed: bool) -> None:
    """Add the rows of all cells. A fixed number is only measured in one batch size: tokens per forward pass do not
    depend on it."""
    options = {"num_speculative_tokens": NUM_FIXED} if is_fixed else {}
    rounds, batches = (args.fixed_rounds, BATCHES[-1:]) if is_fixed else (args.rounds, BATCHES)
    draws = random.Random(0)
    with ExitStack() as closing:
        llms = build(model, closing, **options)
        for kind, temperature, batch_size in product(args.kinds, TEMPERATURES, batches):
            cell = {"prompts": kind, "temperature": temperature, "batch_size": batch_size}
            found = measure(llms, cell, rounds, args.max_tokens, draws)
            row = {"number": "fixed" if is_fixed else "default", **cell, **summary(found)}
            print(*row.values(), flush=True)
            record["rows"].append(row)
            write(record, args.out)


def summary(found: list[dict[str, Timed]]) -> dict[str, Any]:
    """tokens_per_pass: of a request. of_better: the ratio to the better of the two methods alone."""
    speeds = {name: median(each[name].tokens_per_s / each[PLAIN].tokens_per_s for each in found) for name in found[0]}
    tokens = {name: fmean(each[name].tokens_per_pass for each in found) for name in found[0]}
    better = max((FIRST, SECOND), key=speeds.__getitem__)
    return {
        "tokens_per_pass": {name: round(value, 3) for name, value in tokens.items()},
        "tokens_of_better": round(tokens[BOTH] / max(tokens[FIRST], tokens[SECOND]), 3),
        "speed_up": {name: round(value, 3) for name, value in speeds.items()},
        "speed_of_better": round(median(each[BOTH].tokens_per_s / each[better].tokens_per_s for each in found), 3),
    }


if __name__ == "__main__":
    main()
