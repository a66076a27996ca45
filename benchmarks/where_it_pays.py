"""Measures where drafts pay: the speed-up of ngram by output length and by batch size, with default settings.

    python benchmarks/where_it_pays.py     # writes benchmarks/results/where_it_pays.json

Prompts are edits of code, whose output repeats the prompt, and new code, which repeats it least. In each round the
same prompts are decoded plainly and with drafts, in turn (interleaved.py). A figure is the median of the ratios of
tokens per second. Prompts count, so that short outputs are mostly prefill.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from default_settings import prompts_of
from interleaved import run_interleaved
from measuring import RESULTS, command, machine, write

from specdec_core import LLM

METHOD = "ngram"
KINDS, TEMPERATURES = ("edits", "code"), (0.0, 1.0)
LENGTHS, BATCHES = (8, 16, 32, 64, 128, 256), (1, 4, 8, 16, 32, 64)
USUAL_LENGTH, FEWEST_PROMPTS = 128, 16


def speed_up(llms: dict[str, LLM], kind: str, temperature: float, batch: int, length: int, rounds: int) -> float:
    prompts = prompts_of(kind, max(batch, FEWEST_PROMPTS), llms["plain"])
    draws, ratios = random.Random(0), []
    for i in range(rounds + 1):
        found = run_interleaved(llms, prompts, temperature, batch, length, draws)
        if i:  # the first is to warm up
            ratios.append(found["drafts"].tokens_per_s / found["plain"].tokens_per_s)
    return round(median(ratios), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", action="store_true", help="keep the figures that the output has already")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "where_it_pays.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("where_it_pays.py"), "machine": machine(), "method": METHOD}
    record |= {"rounds": args.rounds, "usual_length": USUAL_LENGTH, "rows": []}
    if args.resume:
        record["rows"] = json.loads(args.out.read_text(encoding="utf-8"))["rows"]
    cells = [(1, length) for length in LENGTHS] + [(batch, USUAL_LENGTH) for batch in BATCHES if batch > 1]
    with LLM("tiny") as plain, LLM("tiny", speculative_config=METHOD) as drafts:
        todo = [*product(cells, KINDS, TEMPERATURES)][len(record["rows"]) :]
        for (batch, length), kind, temperature in todo:
            figure = speed_up({"plain": plain, "drafts": drafts}, kind, temperature, batch, length, args.rounds)
            row = {"prompts": kind, "temperature": temperature, "batch_size": batch, "num_output_tokens": length}
            record["rows"].append({**row, "speed_up": figure})
            print(*record["rows"][-1].values(), flush=True)
            write(record, args.out)


if __name__ == "__main__":
    main()
