"""Measures the speed-up of every method with default options: batches of 1 and 16, greedy and at temperature 1.

    python benchmarks/overview.py        # writes benchmarks/results/overview.json

`spec-decode bench` runs the same prompts with and without speculation in turn, in one process. There are two sets of
prompts. The held-out prompts (heldout.py) are code that neither the model nor its draft models and EAGLE heads were
trained on. The edits (prompts.py) ask for a copy of some code with a change.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import heldout
from learned import Bench
from measuring import RESULTS, command, write
from prompts import edit_prompts

from specdec_core import resolve_model

NUM_PROMPTS = 16
BATCHES, TEMPERATURES = (1, 16), (0.0, 1.0)
NGRAM = {"method": "ngram"}
# Several runs of the same prompts would find their own outputs in the cache of outputs. suffix.py measures the cache.
SUFFIX = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}


class Row(NamedTuple):
    prompts: str
    speculative_config: dict[str, Any]


ROWS = (
    Row("edits", NGRAM),
    Row("held-out", NGRAM),
    Row("edits", SUFFIX),
    Row("held-out", SUFFIX),
    Row("held-out", {"method": "draft_model"}),
    Row("held-out", {"method": "eagle"}),
    Row("held-out", {"method": "eagle3"}),
    Row("held-out", {"method": "mtp"}),
    Row("held-out", {"method": "mlp_speculator"}),
    Row("held-out", {"method": "medusa"}),
)


def write_prompts(name: str, file: Path) -> None:
    texts: Iterable[str] = edit_prompts().values() if name == "edits" else heldout.texts()
    chosen = [*islice(texts, NUM_PROMPTS)]
    chosen += chosen[: NUM_PROMPTS - len(chosen)]  # there are eight edits
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in chosen), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS / "overview.json")
    methods = sorted({row.speculative_config["method"] for row in ROWS})
    parser.add_argument("--only", nargs="+", choices=methods, help="Measure these again, keep other rows of --out.")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("overview.py"), "max_tokens": args.max_tokens, "runs": args.runs}
    rows: list[dict[str, Any]] = [row._asdict() for row in ROWS]
    if args.only:
        old = json.loads(args.out.read_text(encoding="utf-8"))
        for key in ("max_tokens", "runs"):
            if old[key] != record[key]:
                parser.error(f"{args.out} has {key} {old[key]}, not {record[key]}: give the same, or leave --only out")
        record["command"] = old["command"]
        rows = [{**was, **row} for was, row in zip(old["rows"], rows, strict=True)]
    record |= {"num_prompts": NUM_PROMPTS, "rows": rows}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for prompts in ("edits", "held-out"):
            write_prompts(prompts, folder / f"{prompts}.jsonl")
        for row in rows:
            config = row["speculative_config"]
            if args.only and config["method"] not in args.only:
                continue
            row["cells"] = []
            for batch_size, temperature in product(BATCHES, TEMPERATURES):
                bench = Bench(folder, args.runs, args.max_tokens, batch_size)
                model, file = Path(resolve_model(args.model)), folder / f"{row['prompts']}.jsonl"
                found = bench(model, file, config, temperature)
                row["cells"].append({"batch_size": batch_size, "temperature": temperature, **found["total"]})
                print(row["prompts"], config, batch_size, temperature, found["total"]["speed_up"], flush=True)
            record |= {"machine": found["machine"], "versions": found["versions"], "dtype": found["model"]["dtype"]}
            write(record, args.out)


if __name__ == "__main__":
    main()
