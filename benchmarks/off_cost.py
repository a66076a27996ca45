"""Measures what a proposer costs while no request drafts: steps of engines that have one, against plain ones.

    python benchmarks/off_cost.py     # writes benchmarks/results/off_cost.json

The proposer is built, and its budget is told that drafting takes a second, so that every request is off and none is
tried again. An engine of this kind and two plain ones step in turn, some steps at a time. Of each such group, the ratio
of their times is a median of many; a figure is the median of the groups: two engines that do the same work differ by a
percent or two, by where their memory lies. How far two plain ones differ is recorded beside it.
"""

from __future__ import annotations

import argparse
import random
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
from specdec_core.engine.engine import Engine
from specdec_core.engine.rest import MOST_STEPS

BATCHES = (1, 8, 64)
NUM_GROUPS = 15
NUM_TURNS, NUM_STEPS, NUM_WARM = 6, MOST_STEPS, 64
PREFILL_TOKENS, NUM_PREFILLS = 512, 20
DEAR_S = 1.0
NO_RETRY_S = 1e9
"""What earlier retries seem to have taken: so none is due."""
PLAIN, OFF, PLAIN_TOO = range(3)
ORDERS = random.Random(0)
Group = tuple[Engine, Engine, Engine]
"""A plain engine, one whose proposer is off, and another plain one."""
Times = list[tuple[float, ...]]
"""The seconds of a step of the three engines, in each turn."""


class Dear(Clock):
    """What seems to take DEAR_S, whatever is measured."""

    def seconds(self, batch_size: int) -> float:
        return DEAR_S


def turn_off(engine: Engine) -> None:
    for drafter in engine._speculation.drafters:
        assert drafter.budget is not None
        drafter.budget._first = Dear()
        drafter.budget.retries._debt.add(NO_RETRY_S)


def add(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [engine.add_request(token_ids, params) for token_ids in prompts]


def steps_s(engine: Engine, number: int) -> float:
    """The mean time of a step: what is put off until a rest ends counts, too."""
    started = perf_counter()
    for _ in range(number):
        assert not engine.step().num_draft_tokens
    return (perf_counter() - started) / number


def decode_times(group: Group, prompts: Sequence[Sequence[int]]) -> Times:
    ids = [add(engine, prompts, NUM_WARM + NUM_TURNS * NUM_STEPS + 8) for engine in group]
    for engine in group:
        steps_s(engine, NUM_WARM)
    found = [in_turn(group, lambda engine: steps_s(engine, NUM_STEPS)) for _ in range(NUM_TURNS)]
    for engine, of_one in zip(group, ids, strict=True):
        engine.cancel(*of_one)
    return found


def prefill_times(group: Group) -> Times:
    def run(engine: Engine) -> float:
        (request_id,) = add(engine, [token_ids], 4)
        seconds = steps_s(engine, 1)
        engine.cancel(request_id)
        return seconds

    found = []
    for turn in range(NUM_PREFILLS):
        token_ids = prompt(PREFILL_TOKENS, turn)
        found.append(in_turn(group, run))
    return found


def in_turn(group: Group, run: Callable[[Engine], float]) -> tuple[float, ...]:
    seconds = {place: run(group[place]) for place in ORDERS.sample(range(3), 3)}
    return seconds[PLAIN], seconds[OFF], seconds[PLAIN_TOO]


def ratio(turns: Times, place: int) -> float:
    """Of an engine's times to those of the first plain one."""
    return round(median(times[place] / times[PLAIN] for times in turns), 4)


def row(step: str, batch_size: int, groups: Sequence[Times]) -> dict[str, Any]:
    of_off, of_plain = ([ratio(turns, place) for turns in groups] for place in (OFF, PLAIN_TOO))
    found = {
        "step": step,
        "batch_size": batch_size,
        "plain_ms": round(1000 * median(times[PLAIN] for turns in groups for times in turns), 4),
        "ratio": median(of_off),
        "plain_ratio": median(of_plain),
        "of_groups": of_off,
        "of_plain_groups": of_plain,
    }
    print(*found.values(), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--groups", type=int, default=NUM_GROUPS)
    parser.add_argument("--out", type=Path, default=RESULTS / "off_cost.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("off_cost.py"), "machine": machine(), "method": args.method}
    decoded: dict[int, list[Times]] = {size: [] for size in args.batches}
    prefilled: list[Times] = []
    for _ in range(args.groups):
        with ExitStack() as closing:
            built = {}
            for place in ORDERS.sample(range(3), 3):
                config = {"method": args.method} if place == OFF else None
                built[place] = closing.enter_context(LLM(args.model, speculative_config=config))
            turn_off(built[OFF].engine)
            group = built[PLAIN].engine, built[OFF].engine, built[PLAIN_TOO].engine
            tokenizer = built[PLAIN].get_tokenizer()
            texts = [tokenizer.encode(text)[:200] for text in heldout.texts()]
            for size, found in decoded.items():
                found.append(decode_times(group, [*islice(cycle(texts), size)]))
            prefilled.append(prefill_times(group))
    record["rows"] = [row("decode", size, found) for size, found in decoded.items()]
    record["rows"].append(row("prefill", 1, prefilled))
    write(record, args.out)


if __name__ == "__main__":
    main()
