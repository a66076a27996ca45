"""Counts how often the host waits for the device in a step, on a pretend GPU: no GPU is needed.

    python benchmarks/device_waits.py     # writes benchmarks/results/device_waits.json

The counts are those of decode steps in which every request has a draft. They are the same on any machine. Attention is
computed by the reference in torch: what Triton kernels read of a forward pass is tested in tests/test_device_waits.py.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("SPECDEC_DISABLE", "kernels")  # whose kernels need a real GPU

import heldout
from measuring import RESULTS, command, write

from specdec_core import LLM, SamplingParams
from specdec_testing.pretend_cuda import PretendCuda

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"prompt_lookup_min": 1},
    "suffix": {"suffix_decoding_min_token_prob": 0.0},
    "draft_model": {},
    "eagle": {},
    "eagle3": {},
    "mtp": {},
    "mlp_speculator": {},
    "medusa": {},
}
BATCHES, TEMPERATURES = (1, 4, 16), (0.0, 1.0)
NUM_STEPS = 8


def waits_of_steps(method: str, batch_size: int, temperature: float, more: dict[str, Any]) -> list[list[str]]:
    """The places at which the host waited, for each step that had a draft (any step in plain decoding)."""
    config = None if method == "plain" else {"method": method, "adaptive_draft_length": False} | METHODS[method] | more
    params = SamplingParams(temperature=temperature, max_tokens=200, ignore_eos=True)
    found: list[list[str]] = []
    with (
        PretendCuda() as pretend,
        LLM("tiny", device="cuda", dtype="float32", speculative_config=config, max_num_seqs=16) as llm,
    ):
        tokenizer = llm.get_tokenizer()
        for text in islice(cycle(heldout.texts()), batch_size):
            llm.engine.add_request(tokenizer.encode(text)[:100], params)
        llm.engine.step()
        while len(found) < NUM_STEPS and llm.engine.has_unfinished:
            before = len(pretend.waits)
            report = llm.engine.step()
            if report.num_draft_tokens or config is None:
                found.append(pretend.waits[before:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*METHODS], metavar="METHOD")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--options", type=json.loads, default={}, help="more keys of speculative_config, as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS / "device_waits.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("device_waits.py"), "rows": []}
    for method, batch_size, temperature in product(args.only, args.batches, TEMPERATURES):
        steps = waits_of_steps(method, batch_size, temperature, args.options)
        places = Counter(place for step in steps for place in step)
        row = {
            "method": method,
            "batch_size": batch_size,
            "temperature": temperature,
            "steps": len(steps),
            "waits": median(map(len, steps)) if steps else None,
            "most": max(map(len, steps), default=None),
            "places": {place: round(number / len(steps), 2) for place, number in places.most_common(12)},
        }
        print(method, batch_size, temperature, row["waits"], row["most"], flush=True)
        record["rows"].append(row)
        write(record, args.out)


if __name__ == "__main__":
    main()
