"""Measures the method `ngram` (prompt lookup) against plain decoding.

    python benchmarks/ngram.py                     # writes benchmarks/results/ngram.json and ngram.png
    python benchmarks/ngram.py --prompts FILE      # also measures the prompts of a JSONL file (keys: id, prompt)

The prompts are code to edit, whose completion repeats the prompt, and code to continue. They are decoded greedily; code
to continue is also sampled at temperature 1, where outputs repeat themselves least. Each round runs every prompt with
plain decoding and then with `ngram`, one request at a time, so that changes of the machine's speed affect both. A
prompt's speed-up is the median over the rounds of the ratio of these two times.
"""

from __future__ import annotations

from pathlib import Path

from end_to_end import arguments, measure, plot, say, ways_to_sample
from measuring import command, machine, write
from prompts import edit_prompts, plain_prompts, read_prompts

from specdec_core import LLM

HEADLINE = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5}


def main() -> None:
    parser = arguments(__doc__, "ngram.json")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--most-prompts", type=int, default=20, help="of --prompts")
    args = parser.parse_args()

    greedy, sampled = ways_to_sample(args.max_tokens)
    kinds = {
        "edit": (edit_prompts(), greedy),
        "go on": (plain_prompts(), greedy),
        "go on, sampled": (plain_prompts(), sampled),
    }
    if args.prompts:
        kinds["file"] = (dict(list(read_prompts(args.prompts).items())[: args.most_prompts]), greedy)
    settings = {"headline": HEADLINE}
    plain = LLM(args.model)
    speculating = {name: LLM(args.model, speculative_config=config) for name, config in settings.items()}
    results = {
        kind: measure(plain, lambda: speculating, prompts, params, args.rounds)
        for kind, (prompts, params) in kinds.items()
    }

    record = {
        "command": command("ngram.py"),
        "model": args.model,
        "dtype": str(plain.engine.target.info.dtype),
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
        "machine": machine(),
        "settings": settings,
        "results": results,
    }
    write(record, args.out)
    plot(results, args.out.with_suffix(".png"))
    say(results)


if __name__ == "__main__":
    main()
