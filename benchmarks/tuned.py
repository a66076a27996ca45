"""Measures how good the choice of `spec-decode tune` is, on prompts that it has not seen.

    python benchmarks/tuned.py     # writes benchmarks/results/tuned.json

In each cell, `tune` chooses by every other prompt of a kind. All settings that it tries then decode the other prompts,
each beside plain decoding; the fastest of them, and the chosen one, do so again, in turn. A figure is the ratio of the
chosen setting's tokens per second to those of the fastest. No prompt comes twice, and what a method remembers is
forgotten before each round: it never finds the output of the same prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import heldout
from default_settings import distinct_texts
from interleaved import run_interleaved
from measuring import RESULTS, command, machine, write

from specdec_core import LLM
from specdec_core.cli.options import ModelOptions
from specdec_tools.tune import settings


class Cell(NamedTuple):
    prompts: str
    temperature: float
    batch_size: int


CELLS = (Cell("code", 0.0, 1), Cell("edits", 0.0, 8), Cell("text", 1.0, 1), Cell("edits", 1.0, 1))
NUM_PROMPTS = 32
"""At most, of a kind. Half of them are for `tune`."""
NUM_FASTEST = 4
PLAIN, CHOSEN = "plain", "chosen"


def texts_of(kind: str) -> list[str]:
    """Distinct texts. edits: few, so that copying held-out code is added."""
    copies = [f"# Task: repeat the code unchanged\n{code}\n# Result:\n" for code in heldout.texts()]
    return [*distinct_texts(kind), *(copies if kind == "edits" else [])][:NUM_PROMPTS]


def halves(cell: Cell) -> tuple[list[str], list[str]]:
    """The texts for `tune`, and other ones to measure its choice by."""
    texts = texts_of(cell.prompts)
    assert len(set(texts)) == len(texts), f"{cell.prompts}: a text comes twice"
    assert len(texts) >= 2 * cell.batch_size, f"{cell.prompts}: too few for two batches of {cell.batch_size}"
    return texts[::2], texts[1::2]


def tune(model: str, cell: Cell, texts: list[str], folder: Path) -> dict[str, Any] | None:
    """Returns the speculative_config that `tune` writes."""
    prompts, output = folder / "prompts.jsonl", folder / "best.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    options = {"--model": model, "--prompts": prompts, "--output": output}
    options |= {"--batch-size": cell.batch_size, "--temperature": cell.temperature}
    words = [str(word) for option in options.items() for word in option]
    subprocess.run([sys.executable, "-m", "specdec_core", "tune", *words], check=True)
    found: dict[str, Any] | None = json.loads(output.read_text(encoding="utf-8")).get("speculative_config")
    return found


def speed_ups(
    model: str, configs: dict[str, Any], cell: Cell, texts: list[str], rounds: int, max_tokens: int
) -> dict[str, float]:
    """The median ratio of each setting's tokens per second to those of plain decoding."""
    draws = random.Random(0)
    with ExitStack() as closing:
        llms = {
            name: closing.enter_context(LLM(model, speculative_config=config, disable_log_stats=True))
            for name, config in {PLAIN: None, **configs}.items()
        }
        tokenizer = llms[PLAIN].get_tokenizer()
        prompts = [tokenizer.encode(text) for text in texts]
        run = cell.temperature, cell.batch_size, max_tokens, draws
        run_interleaved(llms, prompts[: cell.batch_size], *run)  # to warm up
        found = [run_interleaved(llms, prompts, *run) for _ in range(rounds)]
    return {name: median(each[name].tokens_per_s / each[PLAIN].tokens_per_s for each in found) for name in configs}


def measure(model: str, cell: Cell, rounds: int, max_tokens: int) -> dict[str, Any]:
    seen, unseen = halves(cell)
    with tempfile.TemporaryDirectory() as folder:
        chosen = tune(model, cell, seen, Path(folder))
    tried, _ = settings(ModelOptions({"model": model, "speculative_config": None}, ()))
    configs = {each.name: each.config for each in tried}
    first = {
        name: speed_ups(model, {name: config}, cell, unseen, 1, max_tokens)[name] for name, config in configs.items()
    }
    fastest = sorted(first, key=first.__getitem__, reverse=True)[:NUM_FASTEST]
    again = speed_ups(
        model, {**{name: configs[name] for name in fastest}, CHOSEN: chosen}, cell, unseen, rounds, max_tokens
    )
    best = max(again, key=again.__getitem__)
    return {
        **cell._asdict(),
        "chosen": chosen,
        "num_tried": len(configs),
        "speed_up": {name: round(value, 3) for name, value in again.items()},
        "fastest": best,
        "of_fastest": round(again[CHOSEN] / max(1.0, again[best]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS / "tuned.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("tuned.py"), "machine": machine(), "rows": []}
    for cell in CELLS:
        record["rows"].append(measure(args.model, cell, args.rounds, args.max_tokens))
        print(record["rows"][-1], flush=True)
        write(record, args.out)


if __name__ == "__main__":
    main()
