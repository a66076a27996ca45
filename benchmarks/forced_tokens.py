"""Counts forward passes of structured output with and without forced tokens (`engine/forced.py`).

    python benchmarks/forced_tokens.py     # writes benchmarks/results/forced_tokens.json

The schemas, patterns and grammars are those of grammar/tests/shapes.py. The figures depend on no clock.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import RESULTS, command, machine, write

from specdec_core import LLM, SamplingParams
from specdec_core.engine import engine as engine_module
from specdec_core.engine.request import Request

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar" / "tests"))
from shapes import Shape, shapes

PROMPT = "# An example of the format:\n"


def run(llm: LLM, asked: Sequence[Shape], max_tokens: int) -> list[tuple[int, int, bool]]:
    """Of each completion: its tokens, its forward passes, and whether it ended by itself."""
    ended: dict[str, Request] = {}
    prompt = llm.get_tokenizer().encode(PROMPT)
    ids = [
        llm.engine.add_request(
            prompt,
            SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=shape.wanted),
            lambda request, _: ended.__setitem__(request.id, request),
        )
        for shape in asked
    ]
    passes: Counter[str] = Counter()
    while llm.engine.has_unfinished:
        passes.update(llm.engine.step().output_per_request.keys())
    return [(ended[each].num_output_tokens, passes[each], ended[each].finish_reason == "stop") for each in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS / "forced_tokens.json")
    args = parser.parse_args()
    asked = shapes(args.number, seed=5)
    with LLM("tiny", dtype="float32", disable_log_stats=True) as llm:
        found = run(llm, asked, args.max_tokens)
        engine_module.forced_tokens = lambda request: []  # type: ignore[assignment]
        without = run(llm, asked, args.max_tokens)
    record: dict[str, Any] = {"command": command("forced_tokens.py"), "machine": machine(), "outputs": len(found)}
    record["ended_by_themselves"] = sum(is_whole for *_, is_whole in found)
    pairs = [*zip(found, without, strict=True)]
    few = [pair for pair in pairs if pair[0][1] >= pair[0][0] / 2]
    for name, some in (("all", pairs), ("at_most_half_forced", few)):
        tokens, passes = sum(one[0] for one, _ in some), sum(one[1] for one, _ in some)
        record[name] = {
            "outputs": len(some),
            "tokens_per_pass": round(tokens / passes, 3),
            "without": round(sum(other[0] for _, other in some) / sum(other[1] for _, other in some), 3),
        }
    print(record)
    write(record, args.out)


if __name__ == "__main__":
    main()
