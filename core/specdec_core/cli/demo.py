"""spec-decode demo: the same prompts, plain and with speculation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
from attrs import frozen
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from specdec_core.cli.options import Setting, load, speculative_config
from specdec_core.cli.prompts import PROMPTS, DemoPrompt
from specdec_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec_core.llm import LLM
    from specdec_core.outputs import RequestOutput

ACCEPTED = "bold green"
NUM_RUNS = 3
SEED = 0  # for temperatures above 0: both ways draw with the same noise


@frozen
class Comparison:
    """One prompt, or all of them, completed both ways. Seconds include the prompt's own pass, and no printing."""

    title: str
    num_tokens: int
    plain_s: float
    speculative_s: float
    num_drafts: int
    num_accepted: int

    def cells(self) -> tuple[str, ...]:
        return (
            self.title,
            str(self.num_tokens),
            f"{self.num_tokens / self.plain_s:.1f}",
            f"{self.num_tokens / self.speculative_s:.1f}",
            f"{self.plain_s / self.speculative_s:.2f}x",
            f"{1 + self.num_accepted / self.num_drafts:.2f}" if self.num_drafts else "no drafts",
        )


@click.command()
@click.option("--model", default="tiny", show_default=True, help="A folder, a name on the model hub, or tiny.")
@click.option("--method", default="ngram", show_default=True, metavar="NAME", help="How to draft.")
@click.option("--set", "settings", type=Setting(), multiple=True, help="A key of speculative_config (repeatable).")
@click.option(
    "--num-speculative-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    default=8,
    show_default=True,
    help="Most draft tokens per step.",
)
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Most tokens per completion.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: always the likeliest token.")
@click.option("--dtype", default="float32", show_default=True, help="In bfloat16, rounding may change the output.")
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    method: str,
    settings: tuple[tuple[str, Any], ...],
    num_speculative_tokens: int,
    max_tokens: int,
    temperature: float,
    dtype: str,
) -> None:
    """Compare plain and speculative decoding on a few prompts.

    The model completes them both ways before your eyes; then both are timed without printing. Ends with exit status 1
    if the output differs, which in float32 it never should: README.md says what bfloat16 may do on some machines.
    """
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=SEED)
    config = speculative_config(method, settings, num_speculative_tokens)
    # color_system None: not even bold, which rich keeps under NO_COLOR
    console = Console(highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    console.out(f"Loading {model} twice, to decode plainly and with {method} ...")
    models = {
        "plain": load(model, dtype=dtype, max_num_seqs=1),
        method: load(model, dtype=dtype, max_num_seqs=1, speculative_config=config),
    }
    for llm in models.values():
        _complete(llm, PROMPTS[0], SamplingParams(temperature=temperature, max_tokens=8, seed=SEED))

    _print_legend(console, method)
    shown = [_show(console, f"{i}/{len(PROMPTS)}", prompt, models, params) for i, prompt in enumerate(PROMPTS, start=1)]
    console.print(Rule("speed", style="dim"))
    console.out(f"{NUM_RUNS} runs of each prompt, both ways in turn, without printing; the median counts.")
    comparisons, differences = [], {}
    for prompt, token_ids in zip(PROMPTS, shown, strict=True):
        comparison, timed_token_ids = _compare(prompt, models, params)
        comparisons.append(comparison)
        differences[prompt.title] = first_difference([*token_ids, *timed_token_ids])
    console.print(_table(comparisons, method))
    if not _print_verdict(console, differences):
        ctx.exit(1)


def _print_legend(console: Console, method: str) -> None:
    if console.is_terminal and console.color_system:
        console.out("This colour:", style=ACCEPTED, end="")
        console.out(f" tokens that {method} drafted and the model accepted.")
    else:
        console.out("Accepted draft tokens are coloured on a terminal (here: no terminal, or NO_COLOR is set).")


def _show(
    console: Console, place: str, prompt: DemoPrompt, models: Mapping[str, LLM], params: SamplingParams
) -> list[list[int]]:
    """Stream the completions by each of the models. Returns their token ids."""
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
        console.out("")
    return token_ids


def _complete(llm: LLM, prompt: DemoPrompt, params: SamplingParams) -> tuple[RequestOutput, float]:
    """The finished request and the seconds that it took."""
    started = perf_counter()
    (output,) = llm.generate(prompt.text, params, use_tqdm=False)
    return output, perf_counter() - started


def _compare(
    prompt: DemoPrompt, models: Mapping[str, LLM], params: SamplingParams
) -> tuple[Comparison, list[list[int]]]:
    """Time both ways in turn, so that whatever else the machine does slows both. Returns every run's token ids, too."""
    runs = [[_complete(llm, prompt, params) for llm in models.values()] for _ in range(NUM_RUNS)]
    outputs = [output for pair in runs for output, _ in pair]
    plain_s, speculative_s = (median(seconds for _, seconds in one_way) for one_way in zip(*runs, strict=True))
    token_ids = [output.outputs[0].token_ids for output in outputs]
    counts = outputs[-1].speculation
    comparison = Comparison(
        prompt.title, len(token_ids[-1]), plain_s, speculative_s, counts.num_drafts, counts.num_accepted
    )
    return comparison, token_ids


def first_difference(outputs: Sequence[Sequence[int]]) -> int | None:
    """The first index at which not all outputs have the same token; None if they are equal."""
    return next((i for i, tokens in enumerate(zip_longest(*outputs)) if len(set(tokens)) > 1), None)


def _table(comparisons: Sequence[Comparison], method: str) -> Table:
    table = Table()
    table.add_column("prompt", no_wrap=True)
    for column in ("tokens", "plain\ntokens/s", f"{method}\ntokens/s", "speed-up", "acceptance\nlength"):
        table.add_column(column, justify="right")
    for comparison in comparisons:
        table.add_row(*comparison.cells())
    table.add_section()
    total = Comparison(
        "total",
        sum(c.num_tokens for c in comparisons),
        sum(c.plain_s for c in comparisons),
        sum(c.speculative_s for c in comparisons),
        sum(c.num_drafts for c in comparisons),
        sum(c.num_accepted for c in comparisons),
    )
    table.add_row(*total.cells())
    return table


def _print_verdict(console: Console, differences: Mapping[str, int | None]) -> bool:
    """differences: {title of the prompt: index of the first output token that is not the same in all runs}."""
    found = {title: index for title, index in differences.items() if index is not None}
    console.out(f"identical output: {'no' if found else 'yes'}")
    for title, index in found.items():
        console.out(f"prompt {title!r} differs from output token {index} on")
    return not found
