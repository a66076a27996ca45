"""Compares the speed of two installations of specdec, for instance before and after a change, on the same requests.

    python benchmarks/before_after.py --before DIR/bin/python        # writes benchmarks/results/before_after.json

The two installations are called "sides". Side "before" is the specdec that DIR/bin/python imports. Side "after" is the
specdec that this script's own Python imports. Each side runs in its own worker process.

A setting is a method, a batch size and a temperature. For each setting both sides complete the same requests in several
rounds. Within a round the sides alternate every STEPS_OF_TURN engine steps (a "turn"), so that other load on the
machine slows both sides alike. The first round warms up. The time of a turn is its median over the other rounds.

For each setting the script sums up the times of each side's turns, and reports the ratio of the sums, after / before. A
ratio below 1 means that the change made specdec faster. The script also reports whether both sides generated the same
tokens. Ways of drafting and batch sizes can be chosen: --ways plain "eagle3, chain" --batches 1 8.

A level of EAGLE-3's head costs a quarter of the difference between a draft of "eagle3, chain", with five tokens, and of
"eagle3, one", at batch 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

HERE = Path(__file__).parent
SIDES = ("before", "after")
Setting = tuple[str, int, float]  # way, batch, temperature
BATCHES, TEMPERATURES = (1, 16), (0, 1)
NUM_ALONE = 4  # requests, one after the other, of a batch of 1
MAX_TOKENS = 64
STEPS_OF_TURN = 16  # after a few, the other side's threads have stopped spinning
EAGLE3 = {"method": "eagle3", "eagle_topk": 1, "num_speculative_tokens": 5}
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "eagle3, chain": EAGLE3,
    "eagle3, one": EAGLE3 | {"num_speculative_tokens": 1},
    "eagle3, tree": EAGLE3 | {"eagle_topk": 4, "eagle_depth": 4, "num_speculative_tokens": 15},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 5},
}


def work() -> None:
    """Run the loop of a worker process, which measures one installation of specdec.

    A run begins with a line of JSON on standard input: [way, batch size, temperature]. `way` is a key of WAYS, the
    speculative configurations. For each further line the worker runs STEPS_OF_TURN engine steps and prints how many
    milliseconds they took, and how many a draft took. When all requests are finished, the worker prints a digest of
    their output tokens instead, and the run ends.
    """
    answers = os.fdopen(os.dup(1), "w")  # libraries print to standard output, too
    os.dup2(2, 1)
    from heldout import texts
    from prompts import edit_prompts

    from specdec_core import LLM, SamplingParams, StreamOutput

    llms: dict[str, LLM] = {}

    def answer(what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    def turns(way: str, batch: int, temperature: float) -> Iterator[list[tuple[int, StreamOutput]]]:
        """Complete the prompts in batches and yield the streamed outputs of every STEPS_OF_TURN engine steps.

        way: a key of WAYS, the speculative configurations.
        batch: number of requests in a batch.
        Each yielded list has pairs (index of the prompt, output).
        """
        if way not in llms:
            llms[way] = LLM("tiny", speculative_config=WAYS[way])
        texts_of_way = edit_prompts().values() if way == "ngram" else texts()
        prompts = list(islice(cycle(list(texts_of_way)), NUM_ALONE if batch == 1 else batch))
        params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=1 if temperature else None)
        for first in range(0, len(prompts), batch):
            outputs = llms[way].stream(prompts[first : first + batch], params)
            while turn := list(islice(outputs, STEPS_OF_TURN * batch)):  # a request has one in every step
                yield [(first + output.prompt_index, output) for output in turn]

    def drafting(way: str) -> tuple[float, float]:
        """Return the seconds that drafting took and the number of drafts, of all runs."""
        found = {metric.name: metric.value for metric in llms[way].get_metrics() if hasattr(metric, "value")}
        seconds, number = (
            next((value for name, value in found.items() if name.endswith(ending)), 0.0)
            for ending in ("spec_decode_draft_seconds", "spec_decode_num_drafts")
        )
        return seconds, number

    def run(way: str, batch: int, temperature: float) -> str:
        written: dict[int, list[int]] = {}
        remaining = turns(way, batch, temperature)
        while True:
            sys.stdin.readline()
            before = drafting(way) if way in llms else (0.0, 0.0)
            started = perf_counter()
            turn = next(remaining, None)
            milliseconds = (perf_counter() - started) * 1e3
            if turn is None:
                return sha256(json.dumps(sorted(written.items())).encode()).hexdigest()
            for number, output in turn:
                written.setdefault(number, []).extend(piece.token_id for piece in output.pieces)
            seconds, drafts = (after - each for after, each in zip(drafting(way), before, strict=True))
            answer([milliseconds, seconds * 1e3 / drafts if drafts else 0.0])

    for line in sys.stdin:
        answer(run(*json.loads(line)))


class Side:
    """A worker process that runs `work` to measure one of the two installations of specdec.

    python: path of the installation's Python interpreter.
    """

    def __init__(self, python: str) -> None:
        command = [python, str(HERE / Path(__file__).name), "--work"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def answer(self) -> list[float] | str:
        assert self._process.stdout is not None
        found: list[float] | str = json.loads(
            self._process.stdout.readline() or sys.exit(f"it ended: {self._process.args}")
        )
        return found

    def close(self) -> None:
        self._process.communicate()


@dataclass
class Run:
    turns: list[float] = field(default_factory=list)  # milliseconds of each
    drafts: list[float] = field(default_factory=list)  # milliseconds that a draft took, in each turn
    digest: str = ""


def run(sides: Mapping[str, Side], setting: Setting) -> dict[str, Run]:
    """Run one setting on both sides (worker processes), which alternate every few engine steps.

    sides: {name of the side: its worker process}.
    setting: (key of WAYS, batch size, temperature).
    Returns {name of the side: Run with the time of each turn and the digest of the output tokens}.
    """
    runs = {name: Run() for name in sides}
    for side in sides.values():
        side.send(json.dumps(setting))
    order = list(sides)
    while order:
        for name in list(order):
            sides[name].send("")
            answer = sides[name].answer()
            if isinstance(answer, str):
                runs[name].digest = answer
                order.remove(name)
            else:
                runs[name].turns.append(answer[0])
                runs[name].drafts.append(answer[1])
        order.reverse()
    return runs


def compare(rounds: Sequence[Mapping[str, Run]]) -> dict[str, Any]:
    """Compute one setting's results: the time ratio after / before, and whether all output tokens are the same.

    rounds: for each round, the runs of both sides as {"before": Run, "after": Run}.
    """
    turns = {
        side: [median(times) for times in zip(*(each[side].turns for each in rounds), strict=True)] for side in SIDES
    }
    return {
        "ratio": round(sum(turns["after"]) / sum(turns["before"]), 4),
        "median_ms_of_a_step": {side: round(median(times) / STEPS_OF_TURN, 3) for side, times in turns.items()},
        "median_ms_of_a_draft": {
            side: round(median(ms for each in rounds for ms in each[side].drafts), 3) for side in SIDES
        },
        "same_tokens": len({each[side].digest for each in rounds for side in SIDES}) == 1,
        "median_ms_of_turns": turns,
    }


def main() -> None:
    from measuring import RESULTS, command, machine, write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="PYTHON")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--temperatures", nargs="+", type=int, choices=TEMPERATURES, default=TEMPERATURES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "before_after.json")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work()
        return
    if args.before is None:
        parser.error("name the other Python: --before DIR/bin/python")
    sides = dict(zip(SIDES, (Side(args.before), Side(sys.executable)), strict=True))
    results = {}
    for setting in product(args.ways, args.batches, args.temperatures):
        way, batch, temperature = setting
        _, *counted = (run(sides, setting) for _ in range(args.rounds + 1))
        name = f"{way}, batch {batch}, temperature {temperature}"
        results[name] = found = compare(counted)
        note = "" if found["same_tokens"] else "  other tokens"
        print(
            f"{name:45} {found['ratio']:.3f} {found['median_ms_of_a_step']} {found['median_ms_of_a_draft']}{note}",
            flush=True,
        )
    for side in sides.values():
        side.close()
    record = {"command": command("before_after.py"), "rounds": args.rounds, "machine": machine(), "results": results}
    write(record, args.out)


if __name__ == "__main__":
    main()
