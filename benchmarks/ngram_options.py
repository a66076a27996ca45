"""Measures how options of the method `ngram` change the number of forward passes, on the prompts of ngram.py.

    python benchmarks/ngram_options.py      # writes benchmarks/results/ngram_options.json

The results are the output tokens per forward pass and the share of draft tokens that are accepted, but no times.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from measuring import RESULTS, machine
from ngram import HEADLINE
from prompts import edit_prompts, plain_prompts, read_prompts

from specdec_core import LLM, SamplingParams

SETTINGS: dict[str, dict[str, Any]] = {
    "min 2, max 5, last": HEADLINE,
    "min 2, max 5, first": {**HEADLINE, "prompt_lookup_match": "first"},
    "5, last": {**HEADLINE, "prompt_lookup_min": 5},
    "5, first": {**HEADLINE, "prompt_lookup_min": 5, "prompt_lookup_match": "first"},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=96)
SAMPLED = SamplingParams(temperature=0.7, seed=0, max_tokens=96)


def figures(llm: LLM, prompts: dict[str, str], params: SamplingParams) -> dict[str, float]:
    outputs = llm.generate(list(prompts.values()), params, use_tqdm=False)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    accepted = sum(output.speculation.num_accepted for output in outputs)
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    return {
        "tokens_per_pass": round(num_tokens / (num_tokens - accepted), 3),
        "share_of_draft_tokens_accepted": round(accepted / max(drafted, 1), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--most-prompts", type=int, default=48, help="of --prompts")
    args = parser.parse_args()
    kinds = {
        "edit": (edit_prompts(), GREEDY),
        "go on": (plain_prompts(), GREEDY),
        "go on, sampled": (plain_prompts(), SAMPLED),
    }
    if args.prompts:
        prompts = dict(list(read_prompts(args.prompts).items())[: args.most_prompts])
        kinds |= {args.prompts.stem: (prompts, GREEDY), f"{args.prompts.stem}, sampled": (prompts, SAMPLED)}
    results: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for name, setting in SETTINGS.items():
        llm = LLM("tiny", max_num_seqs=16, speculative_config=setting)
        for kind, (prompts, params) in kinds.items():
            results[kind][name] = figures(llm, prompts, params)
            print(f"{kind:14} {name:20} {results[kind][name]}")
    command = shlex.join(["python", "benchmarks/ngram_options.py", *(Path(arg).name for arg in sys.argv[1:])])
    record = {"command": command, "machine": machine(), "settings": SETTINGS, "results": results}
    (RESULTS / "ngram_options.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
