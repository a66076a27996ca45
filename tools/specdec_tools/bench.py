"""spec-decode bench: the speed-up of speculative over plain decoding on given prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import click
from tqdm import tqdm

from specdec_core.cli.options import ModelCommand, ModelOptions, model_options
from specdec_core.config.sampling import SamplingParams
from specdec_core.errors import ConfigError
from specdec_tools.bench_tables import print_results
from specdec_tools.compare import Comparison, TimedModel, compare
from specdec_tools.configurations import Configuration, Numbers, Ran, configurations
from specdec_tools.files import TitledPrompt, check_writable, read_prompts, write_text
from specdec_tools.results import Result
from specdec_tools.tasks import PROMPTS
from specdec_tools.work import Work

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
FILE = click.Path(path_type=Path)
WARM_UP = 8
"""Most tokens of a completion in the warm-up, and its requests at a given rate."""


@click.command("bench", cls=ModelCommand)
@model_options(method="ngram", many_configs=True)
@click.option(
    "--prompts",
    "prompts_file",
    metavar="FILE",
    type=FILE,
    help="A prompt in each line, or .jsonl: `prompt` and `group`, or Spec-Bench's or SPEED-Bench's layout.  "
    "[default: built-in ones]",
)
@click.option("--batch-size", type=click.IntRange(min=1), show_default="1", help="Requests submitted together.")
@click.option(
    "--concurrency",
    type=Numbers(int),
    metavar="N,N,...",
    help="Instead of batches: numbers of users; each sends the next request when one is answered.",
)
@click.option(
    "--request-rate",
    type=Numbers(),
    metavar="R,R,...",
    help="Instead of batches: requests per second that arrive at random, answered or not.",
)
@click.option(
    "--num-requests",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="all prompts, and with --concurrency at least twice its largest number",
    help="Requests for --concurrency and --request-rate. Prompts are repeated in their order.",
)
@click.option(
    "--synthetic-acceptance",
    "rates",
    type=Numbers(zero=True),
    metavar="R,R,...",
    help="Measure also drafts that cost next to nothing and are accepted at these rates, one for each position: the "
    "shares of all drafts that are accepted up to there.",
)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Runs of each batch or load, plain and speculative.",
)
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Most tokens per completion.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy decoding.")
@click.option(
    "--seed",
    type=int,
    help="Seed of each completion above temperature 0, whose drafts are then not sampled, and of --request-rate. Left "
    "out: none.",
)
@click.option("--output", metavar="FILE", type=FILE, help="Write all results to this JSON file.")
@click.option(
    "--plot",
    "plot_file",
    metavar="FILE",
    type=FILE,
    help=f"Draw speed-ups, or the load's tokens/s, and acceptance ({', '.join(PLOT_SUFFIXES)}).",
)
def command(
    options: Sequence[ModelOptions],
    prompts_file: Path | None,
    batch_size: int | None,
    concurrency: tuple[int, ...] | None,
    request_rate: tuple[float, ...] | None,
    num_requests: int | None,
    rates: tuple[float, ...] | None,
    runs: int,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    output: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure speculative against plain decoding.

    The same model completes the prompts with and without speculation, several times in turn. Times are medians of these
    runs. Prompts of different groups are never in the same batch. Several --config files are compared with the same
    plain runs. The table shows whether outputs differ; the exit status is 0 even if they do.
    """
    if rates and seed is None:
        seed = 0  # known outputs must come again
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    prompts = read_prompts(prompts_file) if prompts_file is not None else list(PROMPTS)
    _check_files(output, plot_file)
    work = Work.of(prompts, batch_size, concurrency, request_rate, num_requests, seed or 0)
    chosen = configurations([_with_seats(each, work) for each in options], rates or ())
    models = [TimedModel.load(chosen[0].options.with_keywords(speculative_config=None)), *(c.load() for c in chosen)]
    _warm_up(models, prompts, work, params)
    results = _measure(chosen, models, work, params, runs)
    if num_cut := sum(prompt.num_left_out > 0 for prompt in prompts):
        click.echo(f"of {num_cut} conversations only the first turn is run\n")
    print_results(results)
    if output is None and plot_file is None:
        return
    from specdec_tools import bench_plot, bench_report

    if output is not None:
        settings: dict[str, Any] = {
            "llm": dict(chosen[0].options.keywords),
            "prompts": "built-in" if prompts_file is None else str(prompts_file),
            "num_conversations_cut_to_their_first_turn": num_cut,
            **work.settings,
            "runs": runs,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        write_text("--output", output, bench_report.as_json(results, settings, models[1].llm.engine.target.info))
    if plot_file is not None:
        bench_plot.plot(results, plot_file)


def _with_seats(options: ModelOptions, work: Work) -> ModelOptions:
    return options if work.seats is None else options.with_keywords(max_num_seqs=work.seats)


def _warm_up(models: Sequence[TimedModel], prompts: Sequence[TitledPrompt], work: Work, params: SamplingParams) -> None:
    """Run all models shortly. The plain one also refuses a prompt that is too long now, not after an hour."""
    models[0].run([prompt.text for prompt in prompts], attrs.evolve(params, max_tokens=1))
    first = [prompt.text for prompt in work.parts[0].prompts[: work.seats or WARM_UP]]
    few = attrs.evolve(params, max_tokens=min(params.max_tokens or WARM_UP, WARM_UP))
    plain = models[0].run(first, few)
    for model in models[1:]:
        model.remember(plain)
        model.run(first, few)


def _measure(
    chosen: Sequence[Configuration], models: Sequence[TimedModel], work: Work, params: SamplingParams, num_runs: int
) -> list[Result]:
    rows: list[dict[str, list[Comparison]]] = [{} for _ in chosen]
    for part in tqdm(work.parts, unit="load" if work.is_load else "batch", disable=not sys.stderr.isatty()):
        texts, groups = [prompt.text for prompt in part.prompts], tuple(prompt.group for prompt in part.prompts)
        compared = compare(part.title, texts, models, params, num_runs, load=part.load, groups=groups)
        for own, comparison in zip(rows, compared, strict=True):
            own.setdefault(part.row, []).append(comparison)
    loads = {part.row: part.load.settings for part in work.parts if part.load is not None}
    return [
        Result(Ran.of(configuration, model, params, work.how), own, loads)
        for configuration, model, own in zip(chosen, models[1:], rows, strict=True)
    ]


def _check_files(output: Path | None, plot_file: Path | None) -> None:
    """Check, before anything is measured, that the files of --output and --plot can be written.

    output, plot_file: the files; None: the option was not given.
    Raises ConfigError if a file cannot be written, if the plot's suffix is unknown, or if matplotlib is not installed.
    """
    check_writable("--output", output)
    check_writable("--plot", plot_file)
    if plot_file is None:
        return
    if plot_file.suffix.lower() not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {str(plot_file)!r} has no known suffix: allowed are {', '.join(PLOT_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install matplotlib")
