"""Counts what the plugins in examples/plugins draft, beside `ngram` and `suffix`: tokens per forward pass, no times.

    python benchmarks/example_plugins.py [--humaneval FILE]     # writes benchmarks/results/example_plugins.json

The prompts are held-out code (heldout.py) and, if given, those in FILE: HumanEval's .jsonl file, or another one with
the key `prompt`. They are completed eight at a time, in float32, and each method drafts in every step that it can:
the counts do not depend on the machine.

The examples need not be installed. They are loaded from their folders.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import heldout
from measuring import RESULTS, command, machine, write

from specdec_core import LLM, Plugins, SamplingParams
from specdec_tools.files import read_prompts
from specdec_tools.repetition import loop_start

DTYPE = "float32"
OUTPUT = RESULTS / "example_plugins.json"
EXAMPLES = Path(__file__).parents[1] / "examples" / "plugins"
MODULES = {"token-recycling": "token_recycling", "logitspec": "logitspec"}
SETTINGS: dict[str, dict[str, Any]] = {
    "Token Recycling, 12 nodes": {"method": "token_recycling", "num_speculative_tokens": 12},
    "Token Recycling, 80 nodes": {"method": "token_recycling", "num_speculative_tokens": 80},
    "LogitSpec, 12 nodes": {"method": "logitspec", "num_speculative_tokens": 12},
    "LogitSpec, 63 nodes": {"method": "logitspec", "num_speculative_tokens": 63},
    "ngram, chain of 12": {"method": "ngram", "num_speculative_tokens": 12},
    "suffix, tree of 12": {
        "method": "suffix",
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_use_tree": True,
        "num_speculative_tokens": 12,
    },
}
"""{name: speculative_config}. LogitSpec's and Token Recycling's larger numbers are their papers'."""


def counts(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> dict[str, Any]:
    """Complete the prompts. Only forward passes that yield output tokens count: of a prompt, the one over its end."""
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    total = sum((output.speculation for output in outputs[1:]), outputs[0].speculation)
    num_passes = num_tokens - total.num_accepted
    return {
        "num_tokens": num_tokens,
        "num_forward_passes": num_passes,
        "num_drafts": total.num_drafts,
        "num_draft_tokens": total.num_draft_tokens,
        "num_accepted": total.num_accepted,
        "tokens_per_forward_pass": round(num_tokens / num_passes, 3),
        "acceptance_length": round(total.acceptance_length, 3),
    }


def kinds(prompts: Sequence[str], max_tokens: int) -> dict[str, list[SamplingParams]]:
    """Return {kind of decoding: the sampling parameters of each prompt}. "greedy" ends where plain decoding begins to
    repeat itself, as small models do: repetition is easy to draft."""
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    plain = LLM("tiny", dtype=DTYPE).generate(list(prompts), greedy, use_tqdm=False)
    starts = [max(1, loop_start(output.outputs[0].token_ids)) for output in plain]
    return {
        "greedy": [SamplingParams(temperature=0.0, max_tokens=start) for start in starts],
        "temperature 1": [SamplingParams(temperature=1.0, seed=0, max_tokens=max_tokens)] * len(prompts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--humaneval", type=Path, metavar="FILE")
    parser.add_argument("--most-prompts", type=int, default=20, help="of FILE")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--only", default="", help="ways with this in their names; the other rows stay as they are")
    args = parser.parse_args()
    sets = {"held-out": list(heldout.texts())}
    if args.humaneval:
        sets["HumanEval"] = [prompt.text for prompt in read_prompts(args.humaneval)][: args.most_prompts]
    sys.path += [str(EXAMPLES / folder) for folder in MODULES]
    plugins = Plugins.load(modules=[*MODULES.values()])
    before = json.loads(OUTPUT.read_text(encoding="utf-8"))["rows"] if args.only else []
    rows = [row for row in before if args.only not in row["way"]]
    for prompts, texts in sets.items():
        params = kinds(texts, args.max_tokens)
        for name, setting in SETTINGS.items():
            if args.only not in name:
                continue
            config = {**setting, "adaptive_draft_length": False}
            for kind, each in params.items():
                # A new engine, which has learned nothing yet.
                llm = LLM("tiny", dtype=DTYPE, max_num_seqs=8, plugins=plugins, speculative_config=config)
                rows.append({"way": name, "prompts": prompts, "kind": kind, **counts(llm, texts, each)})
                print(rows[-1], flush=True)
    record = {
        "command": command("example_plugins.py").partition(" --only")[0],
        "machine": machine(),
        "dtype": DTYPE,
        "max_tokens": args.max_tokens,
        "num_prompts": {prompts: len(texts) for prompts, texts in sets.items()},
        "settings": SETTINGS,
        "rows": rows,
    }
    write(record, OUTPUT)


if __name__ == "__main__":
    main()
