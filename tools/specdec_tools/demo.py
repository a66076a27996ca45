"""spec-decode demo: plain and speculative decoding of the same prompts, side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from specdec_core.cli.options import ModelCommand, ModelOptions, model_options
from specdec_core.config.sampling import SamplingParams
from specdec_tools.compare import Comparison, Figures, compare, first_difference, load_both
from specdec_tools.prompts import PROMPTS, TitledPrompt

if TYPE_CHECKING:
    from specdec_core.api.llm import LLM

ACCEPTED = "bold green"
NUM_RUNS = 3
SEED = 0  # for temperatures above 0: plain and speculative decoding sample with the same noise


@click.command("demo", cls=ModelCommand)
@model_options(method="ngram", num_speculative_tokens=8, dtype="float32")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Most tokens per completion.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy decoding.")
@click.pass_context
def command(ctx: click.Context, options: ModelOptions, max_tokens: int, temperature: float) -> None:
    """Compare plain and speculative decoding on a few prompts.

    The model streams the completions with and without speculation, then both are timed without printing. The exit
    status is 1 if outputs differ, which float32 rules out; README.md explains bfloat16.
    """
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=SEED)
    assert options.speculative_config is not None, "there is a default method"
    method = str(options.speculative_config.get("method"))
    # color_system None also turns off bold text, which rich keeps under NO_COLOR
    console = Console(highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    console.out(f"Loading {options.keywords['model']} twice, to decode plainly and with {method} ...")
    models = load_both(options.with_keywords(max_num_seqs=1))
    for model in models:
        model.run([PROMPTS[0].text], SamplingParams(temperature=temperature, max_tokens=8, seed=SEED))

    _print_legend(console, method)
    titled = {"plain": models[0].llm, method: models[1].llm}
    shown = [_show(console, f"{i}/{len(PROMPTS)}", prompt, titled, params) for i, prompt in enumerate(PROMPTS, start=1)]
    console.print(Rule("speed", style="dim"))
    console.out(f"{NUM_RUNS} runs of each prompt, both ways in turn, without printing; the median counts.")
    comparisons, differences = [], {}
    for prompt, token_ids in zip(PROMPTS, shown, strict=True):
        comparison = compare(prompt.title, [prompt.text], models, params, NUM_RUNS)
        comparisons.append(comparison)
        timed_token_ids = [run.token_ids[0] for run in (*comparison.plain, *comparison.speculative)]
        differences[prompt.title] = first_difference([*token_ids, *timed_token_ids])
    console.print(_table(comparisons, method))
    if not _print_verdict(console, differences):
        ctx.exit(1)


def _print_legend(console: Console, method: str) -> None:
    if console.is_terminal and console.color_system:
        console.out("This color:", style=ACCEPTED, end="")
        console.out(f" tokens that {method} drafted and the model accepted.")
    else:
        console.out("Accepted draft tokens are colored on a terminal (here: no terminal, or NO_COLOR is set).")


def _show(
    console: Console, place: str, prompt: TitledPrompt, models: Mapping[str, LLM], params: SamplingParams
) -> list[list[int]]:
    """Stream each model's completion of a prompt to the console. Returns their token ids."""
    console.print(Rule(f"{place} {prompt.title}", style="dim"))
    console.out(prompt.text, style="dim", end="")
    token_ids: list[list[int]] = []
    for title, llm in models.items():
        console.print(Rule(title, align="left", characters="-", style="dim"))
        token_ids.append([])
        for output in llm.stream(prompt.text, params):
            for piece in output.pieces:
                console.out(piece.text, style=ACCEPTED if piece.is_draft else None, end="")
                token_ids[-1].append(piece.token_id)
            console.out(output.rest, end="")
        console.out("")
    return token_ids


def _table(comparisons: Sequence[Comparison], method: str) -> Table:
    table = Table()
    table.add_column("prompt", no_wrap=True)
    for column in ("tokens", "plain\ntokens/s", f"{method}\ntokens/s", "speed-up", "acceptance\nlength"):
        table.add_column(column, justify="right")
    for comparison in comparisons:
        table.add_row(comparison.title, *Figures.of(comparison).cells())
    table.add_section()
    table.add_row("total", *Figures.of(*comparisons).cells())
    return table


def _print_verdict(console: Console, differences: Mapping[str, int | None]) -> bool:
    """Print whether all outputs are identical, and return it. differences: the first differing output token, by
    prompt title; None if there is none."""
    found = {title: index for title, index in differences.items() if index is not None}
    console.out(f"identical output: {'no' if found else 'yes'}")
    for title, index in found.items():
        console.out(f"prompt {title!r} differs from output token {index} on")
    return not found
