"""Measures acceptance by the length of the context: held-out functions with more or less of their module before them.

    python benchmarks/contexts.py     # writes benchmarks/results/contexts.json

Each method drafts as many tokens in every step, greedily. Counts do not depend on how fast the machine is.
"""

from __future__ import annotations

import argparse
import sysconfig
import tomllib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import heldout
from measuring import RESULTS, command, machine, write

from specdec_core import LLM, SamplingParams

LENGTHS = (64, 128, 256, 512, 1024, 1536)
METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mlp_speculator", "medusa", "mtp")
NUM_DRAFT_TOKENS, NUM_FUNCTIONS, NUM_OUTPUT_TOKENS, MOST_OF_FILE = 3, 32, 48, 4
CHAIN = {"eagle": {"eagle_topk": 1}, "eagle3": {"eagle_topk": 1}}


def contexts(llm: LLM) -> Iterator[list[int]]:
    """The LENGTHS[-1] tokens before the bodies of held-out functions, at most MOST_OF_FILE of a file."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in tomllib.loads(heldout.MANIFEST.read_text(encoding="utf-8"))["heldout"]["stdlib"]:
        for path in sorted((library / name).glob("*.py")) or [library / name]:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            ends = sorted(end for _, end in heldout.places("".join(lines)))
            token_ids = (llm.get_tokenizer().encode("".join(lines[: end - 1])) for end in ends)
            yield from islice((ids[-LENGTHS[-1] :] for ids in token_ids if len(ids) >= LENGTHS[-1]), MOST_OF_FILE)


def measure(llm: LLM, given: list[list[int]]) -> list[dict[str, Any]]:
    params, rows = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True), []
    for length in LENGTHS:
        llm.engine.forget()
        outputs = llm.generate([{"prompt_token_ids": ids[-length:]} for ids in given], params, use_tqdm=False)
        counts = sum((output.speculation for output in outputs[1:]), outputs[0].speculation)
        rows.append({"num_context_tokens": length, "acceptance_length": round(counts.acceptance_length, 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--functions", type=int, default=NUM_FUNCTIONS)
    parser.add_argument("--out", type=Path, default=RESULTS / "contexts.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command("contexts.py"), "machine": machine(), "rows": []}
    record |= {"num_draft_tokens": NUM_DRAFT_TOKENS, "num_output_tokens": NUM_OUTPUT_TOKENS}
    for method in METHODS:
        number = {"num_speculative_tokens": NUM_DRAFT_TOKENS, "adaptive_draft_length": False}
        with LLM(args.model, speculative_config={"method": method, **number, **CHAIN.get(method, {})}) as llm:
            given = [*islice(contexts(llm), args.functions)]
            record["num_functions"] = len(given)
            record["rows"] += [{"method": method, **row} for row in measure(llm, given)]
        print(record["rows"][-len(LENGTHS) :], flush=True)
    write(record, args.out)


if __name__ == "__main__":
    main()
