"""This environment against another one, say before a change and after it: the same requests to both, by turns.

    python benchmarks/before_after.py --before DIR/bin/python        # writes benchmarks/results/before_after.json

DIR/bin/python has the other specdec installed. Each side runs in a process of its own; they take turns within a round,
the first one first in every second round. Reported is the ratio of the medians over the rounds, after one that does not
count; and whether both wrote the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

HERE = Path(__file__).parent
BATCHES, TEMPERATURES = (1, 16), (0, 1)
NUM_ALONE = 4  # requests, one after the other, of a batch of 1
MAX_TOKENS = 64
EAGLE3 = {"method": "eagle3", "eagle_topk": 1, "num_speculative_tokens": 5}
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "eagle3, chain": EAGLE3,
    "eagle3, tree": EAGLE3 | {"eagle_topk": 4, "eagle_depth": 4, "num_speculative_tokens": 15},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 5},
}


def work() -> None:
    """For each line with a way, a batch and a temperature: seconds per token, and a digest of the tokens."""
    answers = os.fdopen(os.dup(1), "w")  # libraries print to standard output, too
    os.dup2(2, 1)
    from heldout import texts
    from prompts import edit_prompts

    from specdec_core import LLM, SamplingParams

    llms: dict[str, LLM] = {}

    def run(way: str, batch: int, temperature: float) -> tuple[float, str]:
        if way not in llms:
            llms[way] = LLM("tiny", speculative_config=WAYS[way])
        texts_of_way = edit_prompts().values() if way == "ngram" else texts()
        prompts = list(islice(cycle(list(texts_of_way)), NUM_ALONE if batch == 1 else batch))
        params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=1 if temperature else None)
        started = perf_counter()
        batches = [[prompt] for prompt in prompts] if batch == 1 else [prompts]
        outputs = [output for each in batches for output in llms[way].generate(each, params, use_tqdm=False)]
        seconds = perf_counter() - started
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return seconds / sum(map(len, token_ids)), sha256(json.dumps(token_ids).encode()).hexdigest()

    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), file=answers, flush=True)


class Side:
    """A worker that is asked one thing at a time."""

    def __init__(self, python: str) -> None:
        command = [python, str(HERE / Path(__file__).name), "--work"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, *asked: Any) -> list[Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer: list[Any] = json.loads(self._process.stdout.readline() or sys.exit(f"it ended: {self._process.args}"))
        return answer

    def close(self) -> None:
        self._process.communicate()


def rounds(sides: dict[str, Callable[..., list[Any]]], number: int) -> Iterator[dict[str, dict[str, list[Any]]]]:
    """{setting: {side: its answer}} of each round."""
    for i in range(number):
        found: dict[str, dict[str, list[Any]]] = {}
        for way, batch, temperature in product(WAYS, BATCHES, TEMPERATURES):
            order = sorted(sides, reverse=bool(i % 2))
            name = f"{way}, batch {batch}, temperature {temperature}"
            found[name] = {side: sides[side](way, batch, temperature) for side in order}
        print(f"round {i + 1} of {number}", flush=True)
        yield found


def main() -> None:
    from measuring import RESULTS, command, machine, write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "before_after.json")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work()
        return
    if args.before is None:
        parser.error("name the other Python: --before DIR/bin/python")
    sides = {"before": Side(args.before), "after": Side(sys.executable)}
    _, *counted = rounds({**sides}, args.rounds + 1)
    for side in sides.values():
        side.close()
    results = {}
    for name in counted[0]:
        seconds = {side: [each[name][side][0] for each in counted] for side in sides}
        ratio = median(seconds["after"]) / median(seconds["before"])
        same = all(each[name]["before"][1] == each[name]["after"][1] for each in counted)
        results[name] = {"ratio": round(ratio, 4), "same_tokens": same, "seconds_per_token": seconds}
        print(f"{name:45} {ratio:.3f}{'' if same else '  other tokens'}")
    record = {"command": command("before_after.py"), "rounds": args.rounds, "machine": machine(), "results": results}
    write(record, args.out)


if __name__ == "__main__":
    main()
