"""Measures what a proposer costs while no request drafts: steps of engines that have one, against plain ones.

    python benchmarks/off_cost.py     # writes benchmarks/results/off_cost.json

The proposer is built, and its budget is told that drafting takes a second, so that every request is off and none is
tried again. Engines of both kinds step in turn, a few steps at a time. Of each pair of engines, the ratio of their
times is a median of many; a figure is the median of the pairs: two engines that do the same work differ by a percent
or two, by where their memory lies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import heldout
from measuring import RESULTS, command, machine, write
from random_models import prompt

from specdec_core import LLM, SamplingParams
from specdec_core.budget.clock import Clock
from specdec_core.budget.retries import Retries
from specdec_core.engine.engine import Engine

BATCHES = (1, 8, 64)
NUM_PAIRS = 8
NUM_TURNS, NUM_STEPS, NUM_WARM = 40, 6, 40
PREFILL_TOKENS, NUM_PREFILLS = 512, 20
DEAR_S = 1.0
Pair = tuple[Engine, Engine]
"""A plain engine, and one whose proposer is off."""


class Dear(Clock):
    """What seems to take DEAR_S, whatever is measured."""

    def seconds(self, batch_size: int) -> float:
        return DEAR_S


class NoRetries(Retries):
    @property
    def is_due(self) -> bool:
        return False


def turn_off(engine: Engine) -> None:
    for drafter in engine._speculation.drafters:
        assert drafter.budget is not None
        drafter.budget._first, drafter.budget.retries = Dear(), NoRetries()


def add(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [engine.add_request(token_ids, params) for token_ids in prompts]


def steps_s(engine: Engine, number: int) -> float:
    """The median time of a step."""
    times = []
    for _ in range(number):
        started = perf_counter()
        report = engine.step()
        times.append(perf_counter() - started)
        assert not report.num_draft_tokens
    return median(times)


def decode_times(pair: Pair, prompts: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """The seconds of a step of both engines, in each turn."""
    ids = [add(engine, prompts, NUM_WARM + NUM_TURNS * NUM_STEPS + 8) for engine in pair]
    for engine in pair:
        steps_s(engine, NUM_WARM)
    found = [in_turn(pair, turn, lambda engine, _: steps_s(engine, NUM_STEPS)) for turn in range(NUM_TURNS)]
    for engine, of_one in zip(pair, ids, strict=True):
        engine.cancel(*of_one)
    return found


def prefill_times(pair: Pair) -> list[tuple[float, float]]:
    def run(engine: Engine, turn: int) -> float:
        (request_id,) = add(engine, [prompt(PREFILL_TOKENS, turn)], 4)
        seconds = steps_s(engine, 1)
        engine.cancel(request_id)
        return seconds

    return [in_turn(pair, turn, run) for turn in range(NUM_PREFILLS)]


def in_turn(pair: Pair, turn: int, run: Callable[[Engine, int], float]) -> tuple[float, float]:
    plain, off = pair
    if turn % 2:
        return run(plain, turn), run(off, turn)
    off_s = run(off, turn)
    return run(plain, turn), off_s


def row(step: str, batch_size: int, pairs: Sequence[list[tuple[float, float]]]) -> dict[str, Any]:
    found = {
        "step": step,
        "batch_size": batch_size,
        "plain_ms": round(1000 * median(plain for turns in pairs for plain, _ in turns), 4),
        "ratio": round(median(median(off / plain for plain, off in turns) for turns in pairs), 4),
        "of_pairs": [round(median(off / plain for plain, off in turns), 4) for turns in pairs],
    }
    print(*found.values(), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--out", type=Path, default=RESULTS / "off_cost.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("off_cost.py"), "machine": machine(), "method": args.method}
    with ExitStack() as closing:
        pairs: list[Pair] = []
        for i in range(NUM_PAIRS):
            configs = [None, {"method": args.method}]
            order = configs if i % 2 else configs[::-1]
            llms = [closing.enter_context(LLM(args.model, speculative_config=config)) for config in order]
            plain, off = llms if i % 2 else llms[::-1]
            turn_off(off.engine)
            pairs.append((plain.engine, off.engine))
        tokenizer = plain.get_tokenizer()
        texts = [tokenizer.encode(text)[:200] for text in heldout.texts()]
        record["rows"] = []
        for size in args.batches:
            prompts = [*islice(cycle(texts), size)]
            record["rows"].append(row("decode", size, [decode_times(pair, prompts) for pair in pairs]))
        record["rows"].append(row("prefill", 1, [prefill_times(pair) for pair in pairs]))
    write(record, args.out)


if __name__ == "__main__":
    main()
