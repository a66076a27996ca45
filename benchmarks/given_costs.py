"""Shows what default settings would do on a machine with given costs.

    python benchmarks/given_costs.py [--only COSTS]     # writes benchmarks/results/given_costs.json

What the budget of a step decides depends on what steps cost. Here engine, drafts and acceptance are real, and so is the
time of drafting. The times of forward passes follow a formula (`Costs`), as the engine sees them and as they count. So
a machine can be judged that is not at hand. A row compares default settings and fixed numbers of draft tokens with
plain decoding: times are means over the rounds after the first ones, in which the budget learns.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import attrs
from default_settings import METHODS, num_prompts, prompts_of
from measuring import RESULTS, command, machine, write

from specdec_core import LLM, SamplingParams
from specdec_core.budget.cost_curve import sizes_up_to
from specdec_core.engine import build
from specdec_core.engine.speculation import Speculation
from specdec_core.engine.step_report import StepReport
from specdec_tools.tune import NUMBERS

NUM_LEARNING = 2
"""Rounds that do not count."""
NOISE, OUTLIER_SHARE, OUTLIER = 0.05, 0.01, 3.0
"""Of the times that the engine sees: their relative deviation, and how often one is OUTLIER times as long."""


@attrs.frozen
class Costs:
    """Milliseconds of a step: a fixed part, and more for each request and each token. Draft tokens add `drafts`, and
    `request_with_drafts` for each request, however many there are."""

    fixed: float
    request: float
    token: float
    drafts: float = 0.0
    request_with_drafts: float = 0.0

    def seconds(self, num_requests: int, num_tokens: int) -> float:
        has_drafts = num_tokens > num_requests
        more = (self.drafts + self.request_with_drafts * num_requests) * has_drafts
        return (self.fixed + self.request * num_requests + self.token * num_tokens + more) / 1000


COSTS = {
    # The embedded model on two cores: steps of 1 to 64 requests, with and without draft tokens, were fitted by hand.
    "two cores with AMX": Costs(1.08, 0.155, 0.015, 0.5, 0.015),
    "two cores without AVX-512": Costs(3.4, 0.4, 0.35, 0.7, 0.0),
    # Memory-bound, as an 8B model in bfloat16 on a GPU: reading the weights takes nearly all of the time.
    "memory-bound": Costs(8.0, 0.03, 0.003, 0.3, 0.0),
}


@contextmanager
def timed_by(costs: Costs, seen: list[float]) -> Iterator[None]:
    """Let all engines that are built within have steps of these costs. The seconds of each step that reads no prompt
    are appended to `seen`."""
    end_step, draws = Speculation.end_step, random.Random(0)

    def end_as_given(self: Speculation, report: StepReport) -> None:
        num_requests = max(1, report.num_decode_requests)
        seconds = costs.seconds(num_requests, num_requests + report.num_nodes)
        if not report.num_prefill_tokens:
            seen.append(seconds + report.draft_s)
        noise = draws.lognormvariate(0, NOISE) * (OUTLIER if draws.random() < OUTLIER_SHARE else 1)
        end_step(self, attrs.evolve(report, target_s=seconds * noise, other_s=0.0))

    def measure_steps(*_: Any, num_speculative_tokens: int, max_num_batched_tokens: int, **__: Any) -> dict[int, float]:
        in_each = 1 + num_speculative_tokens
        return {size: costs.seconds(-(-size // in_each), size) for size in sizes_up_to(max_num_batched_tokens)}

    with patch.object(Speculation, "end_step", end_as_given), patch.object(build, "measure_steps", measure_steps):
        yield


def measure(costs: Costs, cell: dict[str, Any], config: Any, rounds: int, max_tokens: int) -> float:
    """The seconds of a round of a cell with a configuration; None: plain decoding."""
    batch_size, seen = cell["batch_size"], list[float]()
    params = SamplingParams(temperature=cell["temperature"], max_tokens=max_tokens, ignore_eos=True)
    with timed_by(costs, seen), LLM("tiny", speculative_config=config, disable_log_stats=True) as llm:
        prompts = prompts_of(cell["prompts"], min(num_prompts(batch_size), 2 * batch_size), llm)
        of_rounds = []
        for _ in range(rounds + NUM_LEARNING):
            llm.engine.forget()
            seen.clear()
            for first in range(0, len(prompts), batch_size):
                some = [{"prompt_token_ids": token_ids} for token_ids in prompts[first : first + batch_size]]
                llm.generate(some, params, use_tqdm=False)
            of_rounds.append(sum(seen))
    return mean(of_rounds[NUM_LEARNING:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=COSTS, metavar="COSTS")
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--kinds", nargs="+", default=["code", "text"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS / "given_costs.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("given_costs.py"), "machine": machine(), "rows": []}
    for name, method, kind, temperature, batch_size in product(
        args.only, args.methods, args.kinds, args.temperatures, args.batches
    ):
        cell = {"method": method, "prompts": kind, "temperature": temperature, "batch_size": batch_size}
        config = {"method": method, **METHODS[method]}
        configs = {"default": config} | {str(n): {**config, "num_speculative_tokens": n} for n in NUMBERS}
        plain_s = measure(COSTS[name], cell, None, args.rounds, args.max_tokens)
        taken = {key: measure(COSTS[name], cell, each, args.rounds, args.max_tokens) for key, each in configs.items()}
        ups = {key: round(plain_s / seconds, 3) for key, seconds in taken.items()}
        best = max((key for key in ups if key != "default"), key=ups.__getitem__)
        row = {"costs": attrs.asdict(COSTS[name]), "name": name, **cell, "speed_up": ups, "best": int(best)}
        print(name, *cell.values(), ups, flush=True)
        record["rows"].append(row)
        write(record, args.out)


if __name__ == "__main__":
    main()
