"""spec-decode bench: the speed-up of speculative over plain decoding on given prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import attrs
import click
from rich.console import Console
from tqdm import tqdm

from specdec_core.cli.options import ModelCommand, ModelOptions, model_options
from specdec_core.cli.screen import printable
from specdec_core.config.sampling import SamplingParams
from specdec_core.errors import ConfigError
from specdec_tools.advice import advice
from specdec_tools.bench_tables import costs, drafts, latencies, times
from specdec_tools.compare import Comparison, TimedModel, compare, load_both
from specdec_tools.figures import Figures
from specdec_tools.files import TitledPrompt, check_writable, read_prompts, write_text
from specdec_tools.tasks import PROMPTS

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@click.command("bench", cls=ModelCommand)
@model_options(method="ngram", num_speculative_tokens=8)
@click.option(
    "--prompts",
    "prompts_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A prompt in each line, or .jsonl: `prompt` and `group`, or Spec-Bench's or SPEED-Bench's layout.  "
    "[default: built-in ones]",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Requests per batch.")
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Runs of each batch, plain and speculative.",
)
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Most tokens per completion.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy decoding.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for temperatures above 0.")
@click.option("--output", metavar="FILE", type=click.Path(path_type=Path), help="Write all results to this JSON file.")
@click.option(
    "--plot",
    "plot_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=f"Draw speed-ups and acceptance ({', '.join(PLOT_SUFFIXES)}).",
)
def command(
    options: ModelOptions,
    prompts_file: Path | None,
    batch_size: int,
    runs: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    output: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure speculative against plain decoding.

    The same model completes the prompts with and without speculation, several times in turn. Times are medians of these
    runs. Prompts of different groups are never in the same batch. The table shows whether outputs differ; the exit
    status is 0 even if they do.
    """
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    prompts = read_prompts(prompts_file) if prompts_file is not None else list(PROMPTS)
    _check_files(output, plot_file)
    models = load_both(options.with_keywords(max_num_seqs=batch_size))
    batches = list(_batches(prompts, batch_size))
    # Warm-up. It also refuses a prompt that is too long now, not after an hour.
    models[0].run([prompt.text for prompt in prompts], attrs.evolve(params, max_tokens=1))
    models[1].run([prompt.text for prompt in batches[0]], attrs.evolve(params, max_tokens=min(max_tokens, 8)))

    groups: dict[str, list[Comparison]] = {}
    for batch in tqdm(batches, unit="batch", disable=not sys.stderr.isatty()):
        (compared,) = compare(_title(batch), [prompt.text for prompt in batch], models, params, runs)
        groups.setdefault(batch[0].group, []).append(compared)

    method = str((options.speculative_config or {}).get("method", "speculation"))
    what = _what_ran(models[1], method, batch_size, temperature)
    click.echo(printable(what))
    if num_cut := sum(prompt.num_left_out > 0 for prompt in prompts):
        click.echo(f"of {num_cut} conversations only the first turn is run")
    _print(groups, method, models[1].llm.engine.num_speculative_tokens)
    if output is None and plot_file is None:
        return
    from specdec_tools import bench_report

    if output is not None:
        settings = {
            "llm": {**options.keywords, "max_num_seqs": batch_size},
            "prompts": "built-in" if prompts_file is None else str(prompts_file),
            "batch_size": batch_size,
            "runs": runs,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        record = bench_report.record(groups, settings, models[1])
        write_text("--output", output, json.dumps(record, indent=1, default=str) + "\n")
    if plot_file is not None:
        bench_report.plot(groups, method, plot_file, title=what)


def _what_ran(model: TimedModel, method: str, batch_size: int, temperature: float) -> str:
    """Return a line with the model, dtype, method, draft tokens, temperature and batch size that were measured."""
    engine = model.llm.engine
    return (
        f"{engine.target.info.model} in {str(engine.target.info.dtype).removeprefix('torch.')}, "
        f"{method} with num_speculative_tokens={engine.num_speculative_tokens}, temperature {temperature:g}, "
        f"batches of {batch_size}"
    )


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


def _batches(prompts: Sequence[TitledPrompt], batch_size: int) -> Iterator[Sequence[TitledPrompt]]:
    for group in dict.fromkeys(prompt.group for prompt in prompts):
        members = [prompt for prompt in prompts if prompt.group == group]
        for start in range(0, len(members), batch_size):
            yield members[start : start + batch_size]


def _title(batch: Sequence[TitledPrompt]) -> str:
    return batch[0].title if len(batch) == 1 else f"{batch[0].title} to {batch[-1].title}"


def _print(groups: dict[str, list[Comparison]], method: str, num_speculative_tokens: int) -> None:
    figures = {group: Figures.of(*comparisons) for group, comparisons in groups.items()}
    total = Figures.of(*(c for comparisons in groups.values() for c in comparisons))
    console = Console(highlight=False)
    console.print(times(figures, total))
    for table in (drafts(figures, total), costs(figures, total, num_speculative_tokens), latencies(total)):
        console.print()
        console.print(table)
    for line in advice(method, total, num_speculative_tokens):
        console.print(f"\n{line}", markup=False)
