"""Measures a published draft beside its published target: acceptance length, greedy and at temperature 1.

    python benchmarks/published.py meta-llama/Llama-3.1-8B-Instruct yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    python benchmarks/published.py TARGET DRAFT --chat --prompts HumanEval.jsonl    # comparable with papers
    python benchmarks/published.py lmsys/vicuna-13b-v1.3 FasterDecoding/medusa-vicuna-13b-v1.3 --method medusa
    python benchmarks/published.py zai-org/GLM-4.5 --method mtp --engine '{"tensor_parallel_size": 4}'

It writes benchmarks/results/published.json.

Both are names on the model hub or folders. docs/checkpoints.md lists pairs. The prompts are held-out code
(heldout.py), or those of a file with the key `prompt`, such as HumanEval's. Drafts have a fixed number of tokens in
every step, so the acceptance length depends on no clock. If the draft's paper has a figure, it is printed beside. The
two are comparable if the prompts are HumanEval's, in the target's chat template (--chat). If the measured length is
far below, specdec probably reads the draft wrongly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import heldout
from measuring import RESULTS, command, machine, write

from specdec_core import LLM, RequestOutput, SamplingParams
from specdec_core.api.arguments import dry_run
from specdec_core.engine.metrics import DraftCounts
from specdec_tools.files import read_prompts

CHAIN: dict[str, Any] = {"num_speculative_tokens": 5}
EAGLE_CHAIN = {"eagle_topk": 1, **CHAIN}
EAGLE_TREE = {"eagle_topk": 10, "eagle_depth": 7, "num_speculative_tokens": 59}
PAPERS_TREE = "tree of the paper"
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "eagle": {"chain of 5": EAGLE_CHAIN, PAPERS_TREE: EAGLE_TREE},
    "eagle3": {"chain of 5": EAGLE_CHAIN, PAPERS_TREE: EAGLE_TREE},
    "medusa": {PAPERS_TREE: {"num_speculative_tokens": 63}},
    "mtp": {"1 token": {"num_speculative_tokens": 1}, "chain of 3": {"num_speculative_tokens": 3}},
    "draft_model": {"chain of 5": CHAIN},
}
"""{method: {name of a way to draft: its keys in speculative_config}}. Other methods draft their default
number."""
DEFAULT: dict[str, dict[str, Any]] = {"default number": {}}
TEMPERATURES = (0.0, 1.0)


class Figure(NamedTuple):
    """What a paper has for a draft.

    greedy: on HumanEval, at temperature 0.
    sampled: at temperature 1, the mean of five sets of prompts; None: not known.
    """

    greedy: float
    sampled: float | None = None


SOURCE = "EAGLE-3, arXiv 2503.01840, table 1, average acceptance length"
PAPERS = {
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": Figure(6.74, 4.92),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": Figure(6.52),
    "yuhuili/EAGLE3-Vicuna1.3-13B": Figure(7.54, 5.67),
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": Figure(4.71, 3.62),  # as EAGLE-2
    "yuhuili/EAGLE-Vicuna-13B-v1.3": Figure(5.41, 4.41),  # as EAGLE-2
    "FasterDecoding/medusa-vicuna-13b-v1.3": Figure(2.78),
}
"""Of drafts in the paper's trees."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft", nargs="?", help="left out: the one that comes with the target, as MTP modules do")
    parser.add_argument("--method", help="left out: told by the draft's tensors")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="left out: of held-out modules")
    parser.add_argument("--num-prompts", type=int, default=40, help="at most")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the target's chat template")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="other keywords of LLM")
    parser.add_argument("--out", type=Path, default=RESULTS / "published.json")
    return parser.parse_args()


def ways(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the speculative_config of each way to draft."""
    given = {"method": args.method, "model": args.draft}
    config = {key: value for key, value in given.items() if value is not None}
    method = args.method or dry_run(args.target, speculative_config=config, **args.engine).speculative.method
    for name, keys in WAYS.get(method, DEFAULT).items():
        yield name, {**config, "method": method, **keys, "adaptive_draft_length": False}


def outputs_of(llm: LLM, args: argparse.Namespace, texts: list[str], temperature: float) -> list[RequestOutput]:
    params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens)
    if args.chat:
        return llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    return llm.generate(texts, params)


def measure(llm: LLM, args: argparse.Namespace, texts: list[str], temperature: float) -> dict[str, Any]:
    started = perf_counter()
    outputs = outputs_of(llm, args, texts, temperature)
    seconds = perf_counter() - started
    counts = sum((output.speculation for output in outputs), DraftCounts())
    return {
        "temperature": temperature,
        "acceptance_length": round(counts.acceptance_length, 3),
        "acceptance_rate_per_pos": [round(rate, 3) for rate in counts.acceptance_rate_per_pos],
        "num_drafts": counts.num_drafts,
        "num_output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "seconds": round(seconds, 1),
    }


def of_the_paper(draft: str | None, way: str, temperature: float) -> float | None:
    figure = PAPERS.get(draft or "")
    if figure is None or way != PAPERS_TREE:
        return None
    return figure.sampled if temperature else figure.greedy


def main() -> None:
    args = arguments()
    given = [prompt.text for prompt in read_prompts(args.prompts)] if args.prompts else [*heldout.texts()]
    texts = given[: args.num_prompts]
    record: dict[str, Any] = {
        "command": command("published.py"),
        "machine": machine(),
        **{name: getattr(args, name) for name in ("target", "draft", "chat", "max_tokens", "engine")},
        "prompts": args.prompts.name if args.prompts else "held-out",
        "num_prompts": len(texts),
        "papers": SOURCE,
        "rows": [],
    }
    print(f"{'drafts':<18} {'temperature':>11} {'acceptance length':>17} {'of the paper':>12}")
    for way, config in ways(args):
        with LLM(args.target, speculative_config=config, **args.engine) as llm:
            for temperature in TEMPERATURES:
                row = {"way": way, "speculative_config": config, **measure(llm, args, texts, temperature)}
                row["of_the_paper"] = of_the_paper(args.draft, way, temperature)
                record["rows"].append(row)
                write(record, args.out)
                shown = row["of_the_paper"] or "-"
                print(f"{way:<18} {temperature:>11g} {row['acceptance_length']:>17.2f} {shown:>12}", flush=True)
    print(f"of the paper: {SOURCE}; at temperature 1 a mean of five sets of prompts")


if __name__ == "__main__":
    main()
