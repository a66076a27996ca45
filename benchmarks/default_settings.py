"""Measures whether speculation with default settings is ever slower than plain decoding.

    python benchmarks/default_settings.py [--only METHOD]     # writes benchmarks/results/default_settings.json
    python benchmarks/default_settings.py --resume            # measures the cells that this file does not have yet
    python benchmarks/default_settings.py --times 3 --out benchmarks/results/default_settings_deep.json

Each cell is a method, a kind of prompt, a temperature and a batch size. In each round, the same prompts are decoded
plainly and with the method, in turn, some tokens at a time (interleaved.py). A cell's figure is the median of the
ratios of tokens per second, with a 95 % confidence interval of their geometric mean. The cells with the lowest medians
are repeated with more rounds, which count instead of the first ones.

--times gives the target that many times as many layers, and the same logits (inflate.py): drafting then costs as little
as beside a larger model.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice, product
from math import exp, log, sqrt
from pathlib import Path
from pydoc_data.topics import topics
from statistics import geometric_mean, mean, median, stdev
from typing import Any

import heldout
from budget_tables import final_rows
from inflate import deeper
from interleaved import run_interleaved
from measuring import RESULTS, command, machine, write
from prompts import edit_prompts

from specdec_core import LLM
from specdec_tools.advice import SLOWER

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {},
    # A round may have the same prompt several times: the cache would find its output.
    "suffix": {"suffix_decoding_max_cached_requests": 0},
    "draft_model": {},
    "eagle3": {},
}
MORE_METHODS: dict[str, dict[str, Any]] = {"eagle": {}, "mtp": {}, "mlp_speculator": {}, "medusa": {}}
KINDS, FEWER_KINDS = ("code", "edits", "text", "random"), ("code", "random")
BATCHES, FEWER_BATCHES = (1, 8, 64), (1, 16)
TEMPERATURES = (0.0, 1.0)
MOST_BATCHES, FEWEST_PROMPTS = 4, 16
"""Of a round: batches until there are enough prompts, so that rounds of small batches are not too short."""
NUM_REPEATED, REPEATED_ROUNDS = 10, 15
STUDENT = {5: 2.776, 15: 2.145}
"""The 97.5 % quantile of Student's t distribution, by number of rounds."""


def distinct_texts(kind: str) -> list[str]:
    """The prompts of a kind. text: articles of Python's documentation."""
    return {"code": [*heldout.texts()], "edits": [*edit_prompts().values()], "text": _articles()}[kind]


def texts_of(kind: str) -> Iterator[str]:
    """The prompts of a kind, over and over, without end."""
    return cycle(distinct_texts(kind))


def _articles() -> list[str]:
    articles = [topics[name].strip() for name in sorted(topics)]
    return [text[: text.rfind(" ", 0, 900)] for text in articles if len(text) > 1200]


def prompts_of(kind: str, number: int, llm: LLM) -> list[list[int]]:
    """As token ids. random: tokens that are drawn."""
    if kind != "random":
        tokenizer = llm.get_tokenizer()
        return [tokenizer.encode(text) for text in islice(texts_of(kind), number)]
    draws, vocab_size = random.Random(0), llm.engine.target.info.vocab_size
    return [[draws.randrange(2, vocab_size) for _ in range(128)] for _ in range(number)]


def num_prompts(batch_size: int) -> int:
    return batch_size * min(MOST_BATCHES, -(-FEWEST_PROMPTS // batch_size))


def measure_cell(plain: LLM, llm: LLM, cell: dict[str, Any], max_tokens: int, rounds: int) -> dict[str, Any]:
    batch_size = cell["batch_size"]
    prompts = prompts_of(cell["prompts"], num_prompts(batch_size), plain)
    draws, both = random.Random(0), {"plain": plain, "method": llm}
    pairs = []
    for i in range(rounds + 1):
        found = run_interleaved(both, prompts, cell["temperature"], batch_size, max_tokens, draws)
        if i:  # the first is to warm up
            pairs.append((found["plain"].tokens_per_s, found["method"].tokens_per_s))
    return {**cell, "plain_tokens_per_s": round(median(a for a, _ in pairs), 1), **summary([b / a for a, b in pairs])}


def summary(ratios: list[float]) -> dict[str, Any]:
    logs = [log(ratio) for ratio in ratios]
    half = STUDENT[len(logs)] * stdev(logs) / sqrt(len(logs))
    return {
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median": round(median(ratios), 3),
        "low": round(exp(mean(logs) - half), 3),
        "high": round(exp(mean(logs) + half), 3),
    }


def cells_of(method: str) -> list[dict[str, Any]]:
    """The cells in random order: what the engine learned of one must not make another one slower."""
    kinds, batches = (KINDS, BATCHES) if method in METHODS else (FEWER_KINDS, FEWER_BATCHES)
    cells = [
        {"method": method, "prompts": kind, "temperature": temperature, "batch_size": batch}
        for kind, temperature, batch in product(kinds, TEMPERATURES, batches)
    ]
    random.Random(method).shuffle(cells)
    return cells


def is_cell(row: dict[str, Any], cell: dict[str, Any]) -> bool:
    return all(row[key] == cell[key] for key in cell)


def overall(record: dict[str, Any]) -> dict[str, Any]:
    """num_slower: cells whose whole interval lies below SLOWER."""
    rows = final_rows(record)
    medians = [row["median"] for row in rows]
    return {
        "median": median(medians),
        "geometric_mean": round(geometric_mean(medians), 3),
        "lowest": min(medians),
        "num_slower": sum(row["high"] < SLOWER for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[*METHODS, *MORE_METHODS], metavar="METHOD")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, choices=STUDENT, default=5)
    parser.add_argument("--options", type=json.loads, default={}, help="more keys of speculative_config, as JSON")
    parser.add_argument("--where", type=json.loads, default={}, help="only cells with these values, as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS / "default_settings.json")
    parser.add_argument("--resume", action="store_true", help="keep the cells of --out, which the same engine measured")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("default_settings.py"), "machine": machine(), "rows": []}
    record |= {"max_tokens": args.max_tokens, "times": args.times, "options": args.options, "repeated": []}
    if args.resume:
        record = json.loads(args.out.read_text()) | {"repeated": []}
        if (times := record.get("times", 1)) != args.times:
            parser.error(f"the target of {args.out} is {times} times as deep: pass --times {times}, or another --out")
    with deeper(args.model, args.times) as model, LLM(model, disable_log_stats=True) as plain:

        def measure(cells: list[dict[str, Any]], rounds: int, add: Callable[[dict[str, Any]], None]) -> None:
            for method in dict.fromkeys(cell["method"] for cell in cells):
                config = {"method": method, **(METHODS | MORE_METHODS)[method], **args.options}
                with LLM(model, speculative_config=config, disable_log_stats=True) as llm:
                    for cell in cells:
                        if cell["method"] == method:
                            row = measure_cell(plain, llm, cell, args.max_tokens, rounds)
                            print(*cell.values(), row["median"], row["low"], row["high"], flush=True)
                            add(row)
                            write(record, args.out)

        cells = [cell for method in args.only for cell in cells_of(method) if is_cell(cell, args.where)]
        left = [cell for cell in cells if not any(is_cell(row, cell) for row in record["rows"])]
        measure(left, args.rounds, record["rows"].append)
        if not args.where:
            worst = sorted(record["rows"], key=lambda row: row["median"])[:NUM_REPEATED]
            again = [next(cell for cell in cells if is_cell(row, cell)) for row in worst]
            measure(again, REPEATED_ROUNDS, record["repeated"].append)
    write(record | overall(record), args.out)


if __name__ == "__main__":
    main()
