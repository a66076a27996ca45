"""Measures suffix decoding against plain decoding.

    python benchmarks/suffix.py                    # writes benchmarks/results/suffix.json

The prompts are code to edit, sequences of similar requests, and code to continue. They are decoded greedily; code to
continue is also sampled at temperature 1, where outputs repeat themselves least. Each round runs every prompt with
plain and with suffix decoding, one request at a time. The suffix engine is new in each round, so it drafts from earlier
outputs of the same round only. A prompt's speed-up is the median over the rounds of the ratio of the two times. The
benchmark stops if an output differs from plain decoding's.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from end_to_end import arguments, measure, say, ways_to_sample
from measuring import DISTRIBUTIONS, command, machine, write
from prompts import edit_prompts, functions_alike, plain_prompts, readers_alike, removals_alike, renames_alike

from specdec_core import LLM

SETTINGS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix", "num_speculative_tokens": 24},
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
}
IN_A_ROW = {
    "functions alike": functions_alike,
    "readers alike": readers_alike,
    "renames alike": renames_alike,
    "removals alike": removals_alike,
}
NUM_LAST = 3


def in_a_row(figures: dict[str, Any]) -> dict[str, Any]:
    """Compare the last requests of a sequence with the first one, before which no output was cached.

    Times per token are compared, since outputs differ in length. Speed-ups over plain decoding are compared, too, since
    they do not depend on the machine's current speed.
    figures: results of the sequence, with speeds and speed-ups of each request.
    """
    requests = list(figures["prompts"].values())
    ms = [round(1e3 / request["speculative_tokens_per_s"], 2) for request in requests]
    ups = [request["speed_up"] for request in requests]
    return {
        "ms_per_token": ms,
        "speed_ups": ups,
        "acceptance_lengths": [request["acceptance_length"] for request in requests],
        "last_over_first_ms_per_token": round(median(ms[-NUM_LAST:]) / ms[0], 3),
        "last_over_first_speed_up": round(median(ups[-NUM_LAST:]) / ups[0], 3),
    }


def main() -> None:
    parser = arguments(__doc__, "suffix.json")
    parser.add_argument("--method", choices=SETTINGS, default="suffix", help="another one, to compare")
    args = parser.parse_args()

    greedy, sampled = ways_to_sample(args.max_tokens)
    kinds = {
        "edit": (edit_prompts(), greedy),
        **{kind: (prompts(), greedy) for kind, prompts in IN_A_ROW.items()},
        "go on": (plain_prompts(), greedy),
        "go on, sampled": (plain_prompts(), sampled),
    }
    plain = LLM(args.model)

    def renew() -> dict[str, LLM]:
        return {"headline": LLM(args.model, speculative_config=SETTINGS[args.method])}

    results = {kind: measure(plain, renew, prompts, params, args.rounds) for kind, (prompts, params) in kinds.items()}
    say(results)
    different = [kind for kind, by_setting in results.items() if not by_setting["headline"]["all_identical"]]
    if different:
        raise SystemExit(f"output differs from plain decoding: {', '.join(different)}")
    record = {
        "command": command("suffix.py"),
        "model": args.model,
        "dtype": str(plain.engine.target.info.dtype),
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
        "machine": machine((*DISTRIBUTIONS[:2], f"specdec-proposer-{args.method}")),
        "settings": {"headline": SETTINGS[args.method]},
        "in_a_row": {kind: in_a_row(results[kind]["headline"]) for kind in IN_A_ROW},
        "results": results,
    }
    write(record, args.out)
    for kind, figures in record["in_a_row"].items():
        print(f"{kind}: speed-ups {figures['speed_ups']}, last over first {figures['last_over_first_speed_up']}")


if __name__ == "__main__":
    main()
