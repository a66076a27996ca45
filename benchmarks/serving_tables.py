"""The tables of what a server adds: the cost of HTTP, cached prefixes and predicted outputs."""

from __future__ import annotations

from typing import Any


def serving(record: dict[str, Any]) -> str:
    """Tokens per second of answers over HTTP, relative to `LLM.generate`, and the event loop's CPU time."""
    about = f"{record['machine']['processor']}, {record['num_prompts']} prompts, {record['concurrency']} at a time"
    lines = [
        f"{about}: `{record['command']}`.",
        "",
        "| model | method | `generate`, tokens/s | whole answers | streams | event loop, CPU s per 1,000 tokens |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        method = "plain" if row["method"] is None else f"`{row['method']}`"
        ratios = " | ".join(f"{row[mode]['of_generate']:.2f}" for mode in ("whole", "streams"))
        loop = ", ".join(f"{row[mode]['event_loop_s_per_1000_tokens']:.3f}" for mode in ("whole", "streams"))
        lines.append(f"| {row['model']} | {method} | {row['tokens_per_s']:,} | {ratios} | {loop} |")
    return "\n".join(lines)


def prefix_cache(record: dict[str, Any]) -> str:
    """The second turn of conversations, with a cache of prefixes and without."""
    machine, tokens = record["machine"]["processor"], record["num_prompt_tokens"]
    number = record["rows"][0]["conversations"]
    lines = [
        f"{number} conversations whose first turn has {tokens:,} tokens, {machine}: `{record['command']}`.",
        "",
        "| method | cached tokens | first token, of cold | acceptance length, and cold | equal outputs |",
        "|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        lengths = row["acceptance_length"]
        is_plain = row["method"] == "plain"
        acceptance = "-" if is_plain else f"{lengths['prefix']:.2f}, {lengths['paged']:.2f}"
        name = "plain" if is_plain else f"`{row['method']}`"
        lines.append(
            f"| {name} | {row['cached_tokens']:,.0f} | {row['first_token_of_cold']:.2f} | {acceptance} | "
            f"{row['same_output']} of {row['conversations']} |"
        )
    return "\n".join(lines)


def predictions(record: dict[str, Any]) -> str:
    """Speed-ups, with tokens per forward pass, of edits whose old text is given as the prediction."""
    names = [name for name in record["rows"][0] if name not in ("batch_size", "temperature", "plain")]
    lines = [
        f"{record['num_edits']} functions, {record['machine']['processor']}: `{record['command']}`.",
        "",
        f"| batch, temperature | {' | '.join(names)} |",
        "|---|" + "---|" * len(names),
    ]
    for row in record["rows"]:
        cells = " | ".join(f"{row[name]['speed_up']:.2f} ({row[name]['tokens_per_pass']:.2f})" for name in names)
        lines.append(f"| {row['batch_size']}, {row['temperature']:g} | {cells} |")
    return "\n".join(lines)
