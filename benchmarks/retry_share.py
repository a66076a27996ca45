"""Measures which share of the time retries take on random tokens, where no draft pays.

    python benchmarks/retry_share.py [--only METHOD]     # writes benchmarks/results/retry_share.json

A retry is a draft for requests that do not draft at present, which shows whether drafting pays by now. The cells are
those of default_settings.py. What retries cost is the time of their steps and of the next NUM_AFTER, for which the
caches hold other data than the target's weights, less what as many output tokens take in other steps of as many
requests. Steps in which the budget drafts for another reason count only in the total.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from attrs import frozen
from default_settings import METHODS, MORE_METHODS, cells_of, num_prompts, prompts_of
from interleaved import without_collections
from measuring import RESULTS, command, machine, write

from specdec_core import LLM, SamplingParams
from specdec_core.budget.budget import Budget

KIND = "random"
NUM_AFTER = 4
NUM_WARM, NUM_ROUNDS = 1, 5


@frozen
class Step:
    seconds: float
    num_requests: int
    num_tokens: int  # of output
    is_retry: bool
    drafts: bool


def share_of_retries(steps: Sequence[Step]) -> float:
    """The share of the time of these steps that retries have cost."""
    left, of_retries, others = 0, list[Step](), dict[int, list[float]]()
    for step in steps:
        left = NUM_AFTER + 1 if step.is_retry else left - 1
        if left > 0:
            of_retries.append(step)
        elif not step.drafts:
            others.setdefault(step.num_requests, []).append(step.seconds)
    per_token = {number: fmean(seconds) / number for number, seconds in others.items()}
    known = [step for step in of_retries if step.num_requests in per_token]
    cost_s = sum(step.seconds - step.num_tokens * per_token[step.num_requests] for step in known)
    return cost_s / sum(step.seconds for step in steps)


@without_collections()
def steps_of(llm: LLM, budget: Budget, cell: dict[str, Any], max_tokens: int) -> list[Step]:
    """The steps of a round, without those that read prompts."""
    batch_size, engine, steps = cell["batch_size"], llm.engine, list[Step]()
    prompts = prompts_of(KIND, num_prompts(batch_size), llm)
    params = SamplingParams(temperature=cell["temperature"], max_tokens=max_tokens, ignore_eos=True)
    engine.forget()
    for first in range(0, len(prompts), batch_size):
        for token_ids in prompts[first : first + batch_size]:
            engine.add_request(token_ids, params)
        while engine.has_unfinished:
            started = perf_counter()
            report = engine.step()
            seconds, is_retry = perf_counter() - started, budget.retries.is_alone
            if not report.num_prefill_tokens:
                number, num_tokens = report.num_decode_requests, report.num_output_tokens
                steps.append(Step(seconds, number, num_tokens, is_retry, report.num_nodes > 0))
    return steps


def measure(llm: LLM, cell: dict[str, Any], max_tokens: int, rounds: int) -> dict[str, Any]:
    (drafter,) = llm.engine._speculation.drafters
    assert drafter.budget is not None
    found = [steps_of(llm, drafter.budget, cell, max_tokens) for _ in range(NUM_WARM + rounds)][NUM_WARM:]
    steps = [step for each in found for step in each]
    share, num_retries = share_of_retries(steps), sum(step.is_retry for step in steps)
    return {**cell, "num_steps": len(steps), "num_retries": num_retries, "share": round(share, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--only", nargs="+", default=[*METHODS, *MORE_METHODS], metavar="METHOD")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS / "retry_share.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("retry_share.py"), "machine": machine(), "rows": []}
    for method in args.only:
        config = {"method": method, **(METHODS | MORE_METHODS)[method]}
        with LLM(args.model, speculative_config=config, disable_log_stats=True) as llm:
            for cell in (each for each in cells_of(method) if each["prompts"] == KIND):
                record["rows"].append(measure(llm, cell, args.max_tokens, args.rounds))
                print(*record["rows"][-1].values(), flush=True)
                write(record, args.out)


if __name__ == "__main__":
    main()
