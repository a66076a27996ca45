"""spec-decode check: reports, without loading weights, whether a model would run and how many tokens fit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import click
from rich.table import Table

from specdec_core.cli.options import ModelCommand, ModelOptions, model_options
from specdec_core.cli.screen import cell, counted, make_console
from specdec_core.errors import SpecdecError

if TYPE_CHECKING:
    from specdec_core.engine.design import Design
    from specdec_core.engine.memory import MemoryPlan

MEMORY_FIGURES = ("kv_bytes", "kv_bytes_per_token", "num_tokens", "num_full_requests")
LIMITS = {
    "num_kv_blocks": "num_kv_blocks",
    "max_num_seqs": "max_num_seqs requests of max_model_len tokens, which need no more",
    "memory": "memory",
}


@click.command(cls=ModelCommand)
@model_options()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, of an error too.")
@click.pass_context
def command(ctx: click.Context, options: ModelOptions, as_json: bool) -> None:
    """Check a model and the options of speculation, without loading weights.

    Checks the config file, the options, and the model's configuration, tokenizer and weight files. Prints the
    same errors as loading the model, with exit status 1. Without errors, prints how much memory is needed, and how many
    tokens fit into this machine's free memory.
    """
    try:
        result = options.dry_run()
    except SpecdecError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "error": str(error)}, indent=2))
        ctx.exit(1)
    if as_json:
        click.echo(json.dumps({"ok": True, **_record(result)}, indent=2))
    else:
        _print(result)


def _record(result: Design) -> dict[str, Any]:
    memory, info = result.memory, result.target.info
    return {
        "target": attrs.asdict(info, value_serializer=lambda _, __, it: it if isinstance(it, int) else str(it)),
        "method": " + ".join(method.spec.name for method in result.methods) or None,
        "num_speculative_tokens": result.num_speculative_tokens,
        "memory": {
            **attrs.asdict(memory),
            **{name: getattr(memory, name) for name in MEMORY_FIGURES},
            "scratch_bytes_per_request": memory.scratch_bytes,
        },
    }


def _print(result: Design) -> None:
    info = result.target.info
    console = make_console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    method = " + ".join(method.spec.name for method in result.methods) or "none"
    if result.methods:
        method += f", {counted(result.num_speculative_tokens, 'token')} per step"
    for label, value in (
        ("model", f"{info.model} ({info.model_type}, {info.num_layers} layers)"),
        ("runs on", f"{info.device} in {str(info.dtype).removeprefix('torch.')}"),
        ("speculation", method),
        ("KV manager", result.kv_spec.name),
        *_memory_lines(result.memory),
    ):
        table.add_row(label, cell(value))
    console.print(table)
    console.print("This would run.")


def _memory_lines(memory: MemoryPlan) -> list[tuple[str, str]]:
    per_token = f"{memory.kv_bytes_per_token} bytes per token"
    if memory.draft_kv_bytes_per_token:
        per_token += f" ({memory.draft_kv_bytes_per_token} of them the draft's)"
    scratch = f"{counted(memory.scratch_slots, 'draft slot')} per request, {_size(memory.scratch_bytes)}"
    held = f"{memory.num_blocks} blocks of {memory.block_size} tokens, {_size(memory.kv_bytes)}"
    step = memory.step
    full = f"{memory.num_full_requests} of max_model_len={memory.max_model_len} tokens at once"
    ranks = [("ranks", f"{memory.num_ranks}, and what follows is of each")] if memory.num_ranks > 1 else []
    return [
        *ranks,
        ("free memory", _size(memory.free_bytes)),
        ("target weights", _size(memory.target_weight_bytes)),
        ("draft weights", _size(memory.draft_weight_bytes)),
        ("largest step", f"about {_size(step.num_bytes)}: {step.num_tokens} tokens, {step.num_rows} rows of logits"),
        *([("states", f"{_size(memory.state_bytes)}, of recurrent layers")] if memory.state_bytes else []),
        ("left for KV", _size(memory.kv_budget_bytes)),
        ("KV", per_token),
        ("scratch", scratch if memory.scratch_slots else "none"),
        ("KV cache", f"{held}, limited by {LIMITS[memory.limited_by]}"),
        ("holds", f"{memory.num_tokens} tokens, {full} (max_num_seqs={memory.max_num_seqs})"),
    ]


def _size(num_bytes: int) -> str:
    """A number of bytes as text with at least three digits, such as 1.07 GiB."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    power = min(max(num_bytes, 1).bit_length() - 1, 10 * (len(units) - 1)) // 10
    return f"{num_bytes} bytes" if power == 0 else f"{num_bytes / 1024**power:.2f} {units[power]}"
