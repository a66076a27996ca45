"""spec-decode demo: plain and speculative decoding of the same tasks, side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click
from rich.console import Console
from rich.rule import Rule

from specdec_core.cli.options import ModelCommand, ModelOptions, model_options
from specdec_core.config.sampling import SamplingParams
from specdec_tools import demo_report
from specdec_tools.compare import Comparison, TimedModel, compare, load_both
from specdec_tools.demo_report import ACCEPTED, Answer
from specdec_tools.files import check_writable, write_text
from specdec_tools.progress import working
from specdec_tools.tasks import TASKS, Task

if TYPE_CHECKING:
    from specdec_core import Piece
    from specdec_core.api.llm import LLM

NUM_RUNS = 3
SEED = 0  # for temperatures above 0


@click.command("demo", cls=ModelCommand)
@model_options(method="ngram", dtype="float32")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Most tokens per result.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy decoding.")
@click.option("--svg", metavar="FILE", type=click.Path(path_type=Path), help="Draw the first task and the table.")
@click.pass_context
def command(ctx: click.Context, options: ModelOptions, max_tokens: int, temperature: float, svg: Path | None) -> None:
    """Compare plain and speculative decoding on a few tasks.

    Each task is first completed with and without speculation, and the results are streamed and checked. Then both kinds
    of decoding are timed without printing: first on each task, then on all tasks at temperature 1. The exit status is 1
    if plain and speculative outputs differ. They are not compared if drafts are sampled or the verifier is lossy;
    README.md explains bfloat16. The tasks are edits that the embedded model does right.
    """
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=SEED)
    check_writable("--svg", svg)
    assert options.speculative_config is not None, "there is a default method"
    method = str(options.speculative_config.get("method", "speculation"))
    # color_system None also turns off bold text, which rich keeps under NO_COLOR
    console = Console(highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    with working(console, f"Loading {options.keywords['model']} twice, to decode plainly and with {method}"):
        models = load_both(options.with_keywords(max_num_seqs=1))
    with working(console, "Warming up"):
        for model in models:
            model.run([task.prompt for task in TASKS], attrs.evolve(params, max_tokens=min(8, max_tokens)))

    _print_legend(console, method)
    titled = {"plain": models[0].llm, method: models[1].llm}
    answers = []
    for number, task in enumerate(TASKS, start=1):
        console.print(Rule(f"{number}/{len(TASKS)} {task.title}", style="dim"))
        answers.append(_stream(console, task, titled, params))
    console.print(Rule("speed", style="dim"))
    timed = _time(console, models, params)
    table = demo_report.table(answers, timed, method)
    console.print(table)
    console.out(demo_report.EXPLANATION)
    is_identical = _print_verdict(console, answers, timed)
    if svg is not None:
        write_text("--svg", svg, demo_report.picture(answers[0], table, method))
    if not is_identical:
        ctx.exit(1)


def _print_legend(console: Console, method: str) -> None:
    if console.is_terminal and console.color_system:
        console.out("This color:", style=ACCEPTED, end="")
        console.out(f" tokens that {method} drafted and the model accepted.")
    else:
        console.out("Accepted draft tokens are colored on a terminal (here: no terminal, or NO_COLOR is set).")


def _stream(console: Console, task: Task, models: Mapping[str, LLM], params: SamplingParams) -> Answer:
    """Complete one task with each model, and print the tokens as they are generated.

    models: {title: LLM}, first for plain and then for speculative decoding.
    Returns the tokens of both.
    """
    console.out(task.prompt, style="dim", end="")
    pieces: list[list[Piece]] = []
    for title, llm in models.items():
        console.print(Rule(title, align="left", characters="-", style="dim"))
        pieces.append([])
        for output in llm.stream(task.prompt, params):
            for piece in output.pieces:
                console.out(piece.text, style=ACCEPTED if piece.is_draft else None, end="")
                pieces[-1].append(piece)
            console.out(output.rest, end="")
        console.out("")
    answer = Answer(task, *pieces)
    console.out(f"checked: the result is {'right' if answer.is_right else 'wrong'}", style="dim")
    return answer


def _time(console: Console, models: tuple[TimedModel, TimedModel], params: SamplingParams) -> list[Comparison]:
    """Time plain and speculative decoding of each task alone, and of all tasks at temperature 1."""
    all_prompts = [task.prompt for task in TASKS]
    rows = [(task.title, [task.prompt], params) for task in TASKS]
    timed: list[Comparison] = []
    for title, prompts, its_params in [*rows, ("at temperature 1", all_prompts, attrs.evolve(params, temperature=1.0))]:
        with working(console, f"Timing {title}, {NUM_RUNS} runs each way in turn"):
            timed += compare(title, prompts, models, its_params, NUM_RUNS)
    return timed


def _print_verdict(console: Console, answers: Sequence[Answer], timed: Sequence[Comparison]) -> bool:
    """Print how many results are right, and whether plain and speculative outputs are identical, and return the latter.

    Outputs are not compared if a verifier was used that may choose other tokens than plain decoding does.
    """
    console.out(f"right results: {sum(answer.is_right for answer in answers)} of {len(answers)}")
    others = [comparison.title for comparison in timed if comparison.may_differ]
    both: list[Answer | Comparison] = [*answers, *timed]
    compared = [each for each in both if each.title not in others]
    found = {each.title: each.first_difference for each in compared if each.first_difference is not None}
    for title, index in found.items():
        console.out(f"{title!r} differs from output token {index} on")
    if others:
        console.out(f"not compared, since their verifier may choose other tokens: {', '.join(others)}")
    console.out(f"identical output: {'no' if found else 'yes'}")
    return not found
