"""Write the figures of benchmarks/results into README.md, between its two `measured` comments.

python benchmarks/readme.py            # rewrite the README
python benchmarks/readme.py --check    # exit 1 if it does not say what the results say
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ngram.json"
BEGIN, END = "<!-- measured: from benchmarks/results -->", "<!-- measured: end -->"
KINDS = {
    "edit": "edit this code: the completion repeats the prompt",
    "go on": "go on with this code",
    "go on, sampled": "go on, at temperature 1: it repeats least",
}


def table(record: dict[str, Any]) -> str:
    machine, config = record["machine"], record["settings"]["headline"]
    options = ", ".join(f"`{key}` {value}" for key, value in config.items())
    dtype = record["dtype"].removeprefix("torch.")
    setting = f"The embedded model in {dtype} on a CPU with {machine['threads']} cores, one request at a time"
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    lines = [
        f"{setting}: {options}.",
        f"Medians of {record['rounds']} paired runs of each prompt, {versions}: `{record['command']}`.",
        "",
        "| prompts | speed-up | lowest and highest of a prompt | acceptance length | identical output |",
        "|---|---|---|---|---|",
    ]
    for kind, title in KINDS.items():
        figures = record["results"][kind]["headline"]
        ups = [prompt["speed_up"] for prompt in figures["prompts"].values()]
        lines.append(
            f"| {len(ups)} x {title} | {figures['median_speed_up']:.2f} | {min(ups):.2f}, {max(ups):.2f} | "
            f"{figures['median_acceptance_length']:.2f} | {'yes' if figures['all_identical'] else 'no'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    if not RESULTS.exists():
        sys.exit(f"there are no results in {RESULTS.relative_to(ROOT)}: run make bench")
    figures = table(json.loads(RESULTS.read_text(encoding="utf-8")))
    after = re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{figures}\n\n{END}", before, flags=re.DOTALL)
    if check and after != before:
        sys.exit("README.md does not say what benchmarks/results say: run python benchmarks/readme.py")
    readme.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
