"""Measures predicted outputs: functions of held-out modules in which a name is changed, given as the prediction.

    python benchmarks/predictions.py     # writes benchmarks/results/predictions.json

The engines, with default settings, complete each batch of prompts in turn, in an order that is drawn. A figure is the
median over rounds of the ratio of tokens per second to those of plain decoding in the same round.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sysconfig
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import heldout
from attrs import frozen
from interleaved import Timed
from measuring import RESULTS, command, machine, write

from specdec_core import LLM, SamplingParams

PLAIN = "plain"
ENGINES: dict[str, list[str] | None] = {
    PLAIN: None,
    "ngram": ["ngram"],
    "prediction": ["prediction"],
    "prediction + ngram": ["prediction", "ngram"],
}
NUM_LINES = range(12, 41)
NUM_EDITS, MOST_OF_FILE = 32, 3
CELLS = [(1, 0.0), (1, 1.0), (8, 0.0), (8, 1.0)]
NAMES = ("record", "position", "amount", "label", "entry", "limit")


@frozen
class Edit:
    """A prompt in the format of the embedded model's edits, and the code before the edit."""

    prompt: str
    code: str


def edits() -> Iterator[Edit]:
    """The first functions of NUM_LINES of each held-out file, and the local name that each has most often."""
    library = Path(sysconfig.get_path("stdlib"))
    names = tomllib.loads(heldout.MANIFEST.read_text(encoding="utf-8"))["heldout"]["stdlib"]
    for path in [file for name in names for file in sorted((library / name).glob("*.py")) or [library / name]]:
        source = path.read_text(encoding="utf-8")
        functions = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)]
        yield from islice(filter(None, (_edit(source, each) for each in functions)), MOST_OF_FILE)


def _edit(source: str, function: ast.FunctionDef) -> Edit | None:
    code = textwrap.dedent(ast.get_source_segment(source, function, padded=True) or "")
    found = [each for each in ast.walk(function) if isinstance(each, ast.Name)]
    local = {each.id for each in found if isinstance(each.ctx, ast.Store)}
    counts = Counter(each.id for each in found if each.id in local and len(each.id) > 2)
    if not counts or len(code.splitlines()) not in NUM_LINES:
        return None
    old = counts.most_common(1)[0][0]
    new = next(name for name in NAMES if not re.search(rf"\b{name}\b", code))
    return Edit(f"# Task: rename `{old}` to `{new}`\n{code}\n\n# Result:\n", code + "\n")


def run_round(
    llms: dict[str, LLM], made: Sequence[Edit], batch_size: int, temperature: float, draws: random.Random
) -> dict[str, Timed]:
    """Complete all edits with each engine. Returns what each did."""
    found = {name: Timed() for name in llms}
    for llm in llms.values():
        llm.engine.forget()
    for first in range(0, len(made), batch_size):
        names = [*llms]
        draws.shuffle(names)
        for name in names:
            llm = llms[name]
            for edit in made[first : first + batch_size]:
                token_ids = llm.get_tokenizer().encode(edit.prompt)
                params = SamplingParams(
                    temperature=temperature,
                    max_tokens=2 * len(llm.get_tokenizer().encode(edit.code)),
                    prediction=edit.code if "prediction" in name else None,
                    seed=first,
                )
                llm.engine.add_request(token_ids, params)
            while llm.engine.has_unfinished:
                found[name].step(llm.engine)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "predictions.json")
    args = parser.parse_args()
    made, draws = [*islice(edits(), NUM_EDITS)], random.Random(0)
    record: dict[str, Any] = {"command": command("predictions.py"), "machine": machine(), "num_edits": len(made)}
    record["rows"] = []
    with ExitStack() as closing:
        llms = {
            name: closing.enter_context(
                LLM(args.model, speculative_config=None if methods is None else {"method": methods}, max_num_seqs=16)
            )
            for name, methods in ENGINES.items()
        }
        for batch_size, temperature in CELLS:
            rounds = [run_round(llms, made, batch_size, temperature, draws) for _ in range(args.rounds + 1)][1:]
            row: dict[str, Any] = {"batch_size": batch_size, "temperature": temperature}
            for name in llms:
                ratios = [each[name].tokens_per_s / each[PLAIN].tokens_per_s for each in rounds]
                row[name] = {
                    "speed_up": round(median(ratios), 3),
                    "tokens_per_pass": round(median(each[name].tokens_per_pass for each in rounds), 3),
                }
            print(row, flush=True)
            record["rows"].append(row)
            write(record, args.out)


if __name__ == "__main__":
    main()
