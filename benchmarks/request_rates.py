"""Measures latencies while requests arrive at a low or a high rate, plain and with drafts, with default settings.

    python benchmarks/request_rates.py     # writes benchmarks/results/request_rates.json

Half of the prompts are edits of code, half are new code. Requests arrive at random (a Poisson process), whether or not
earlier ones are answered. In each round every engine serves the same arrivals, in another order. A figure is the median
of the rounds.
"""

from __future__ import annotations

import argparse
import random
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from default_settings import METHODS, prompts_of
from measuring import RESULTS, command, machine, write

from specdec_core import LLM, SamplingParams
from specdec_tools.latencies import percentiles
from specdec_tools.loads import Rate, serve

RATES = (1, 4, 16, 32)
"""Requests per second. 32 are about as many as plain decoding can answer here."""
SECONDS, FEWEST_REQUESTS = 6, 12
"""Of arrivals."""
NUM_OUTPUT_TOKENS = 128
SHOWN = ("plain", "ngram", "suffix", "eagle3")


def latencies(llm: LLM, prompts: list[list[int]], rate: float, seed: int) -> list[float]:
    """Seconds from the arrival of each request to its last token."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    served = serve(llm.engine, prompts, params, Rate(rate, len(prompts), seed))
    ends = [request.last_token_s or 0.0 for request in served.requests]
    return [end - served.started - arrival for end, arrival in zip(ends, served.arrivals_s, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "request_rates.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("request_rates.py"), "machine": machine(), "rows": []}
    record |= {"rounds": args.rounds, "num_output_tokens": NUM_OUTPUT_TOKENS}
    orders = random.Random(0)
    with ExitStack() as closing:
        configs = {name: {"method": name, **METHODS[name]} for name in SHOWN[1:]}
        llms = {name: closing.enter_context(LLM("tiny", speculative_config=configs.get(name))) for name in SHOWN}
        for rate in args.rates:
            number = max(FEWEST_REQUESTS, round(rate * SECONDS)) // 2
            pairs = zip(*(prompts_of(kind, number, llms["plain"]) for kind in ("edits", "code")), strict=True)
            prompts = [*chain(*pairs)]
            found: dict[str, list[tuple[float, ...]]] = {name: [] for name in llms}
            for i in range(args.rounds):
                for name in orders.sample(SHOWN, len(SHOWN)):
                    found[name].append(percentiles(latencies(llms[name], prompts, rate, seed=i)))
            for name, rounds in found.items():
                p50, p95, _ = (round(1000 * median(each), 1) for each in zip(*rounds, strict=True))
                row = {"requests_per_s": rate, "method": name, "num_requests": len(prompts), "p50_ms": p50}
                record["rows"].append({**row, "p95_ms": p95})
                print(*record["rows"][-1].values(), flush=True)
            write(record, args.out)


if __name__ == "__main__":
    main()
