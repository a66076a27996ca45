"""spec-decode tune: tries methods and their settings on the user's model and prompts, and writes the best one down."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import click
from attrs import field, frozen
from rich.table import Table
from tqdm import tqdm

from specdec_core.cli.options import ModelCommand, ModelOptions, model_options
from specdec_core.cli.screen import cell, counted, make_console
from specdec_core.config.sampling import SamplingParams
from specdec_core.errors import ConfigError, SpecdecError
from specdec_core.plugins import Plugins
from specdec_tools.compare import Run, TimedModel
from specdec_tools.files import check_writable, read_prompts, write_text
from specdec_tools.tasks import PROMPTS

NUMBERS = (1, 2, 3, 5, 8)
"""Fixed numbers of draft tokens that are tried, besides a method's own defaults."""
NUM_FIRST = 4
"""Prompts, or batches of them, of the first round."""
KEPT = 1 / 3
"""Share of the settings that a round leaves for the next one, and the fewest."""
FEWEST = 3
WARM_UP = "a = 1"
HIGHER = 4
"""The higher load has so many times as many requests at once, or as many as there are prompts."""
MARGIN = 1.03
"""A method that decides itself how much to draft is chosen unless another setting is faster by more than this."""


@frozen(eq=False)
class Setting:
    """A speculative_config, and the ratios of its tokens per second to those of plain decoding, one for each run."""

    config: dict[str, Any]
    ratios: list[float] = field(factory=list)
    acceptance_lengths: list[float] = field(factory=list)

    @property
    def name(self) -> str:
        methods = self.config["method"]
        others = [f"{key}={value}" for key, value in self.config.items() if key != "method"]
        return ", ".join([methods if isinstance(methods, str) else " + ".join(methods), *others])

    @property
    def is_adaptive(self) -> bool:
        """Whether nothing but the method is given, so that the engine decides how much is drafted."""
        return set(self.config) == {"method"}

    @property
    def speed_up(self) -> float:
        return median(self.ratios)


def settings(options: ModelOptions) -> tuple[list[Setting], dict[str, str]]:
    """Return what is to be tried, and why other methods are not, by name.

    A method is tried with its defaults, with its default number in every step, and with each of NUMBERS. If both a
    method with a model and one without are usable, their combinations are tried, too.
    """
    found: list[Setting] = []
    refused: dict[str, str] = {}
    usable: dict[bool, list[str]] = {True: [], False: []}  # by whether the method has a model
    for name in Plugins.load(disable=options.disable).proposers():
        reason = None
        for config in ({"method": name}, {"method": name, "num_speculative_tokens": NUMBERS[0]}):  # some need a number
            try:
                design = options.with_keywords(speculative_config=config).dry_run()
                break
            except SpecdecError as error:
                reason = reason or str(error)
        else:
            refused[name] = reason or ""
            continue
        usable[design.methods[0].has_model].append(name)
        found += [Setting({"method": name}), Setting({"method": name, "adaptive_draft_length": False})]
        found += [Setting({"method": name, "num_speculative_tokens": number}) for number in NUMBERS]
    pairs = [[first, second] for first in usable[False] for second in usable[True]]
    found += [Setting({"method": pair}) for pair in pairs]
    return [each for each in found if _fits(each, options)], refused


def _fits(setting: Setting, options: ModelOptions) -> bool:
    try:
        options.with_keywords(speculative_config=setting.config).dry_run()
    except SpecdecError:
        return False
    return True


@frozen
class Trial:
    """Prompts in batches, and how they are completed."""

    batches: Sequence[Sequence[str]]
    params: SamplingParams

    def measure(self, plain: TimedModel, model: TimedModel, setting: Setting) -> None:
        """Run the batches plainly and with the setting, in turn, and add to its ratios."""
        pairs = [(plain.run(batch, self.params), model.run(batch, self.params)) for batch in self.batches]
        setting.ratios.append(_per_second([b for _, b in pairs]) / _per_second([a for a, _ in pairs]))
        drafts = [draft for _, run in pairs for draft in run.drafts()]
        accepted = sum(draft.num_accepted for draft in drafts)
        setting.acceptance_lengths.append(1 + accepted / len(drafts) if drafts else 1.0)

    def first(self, number: int) -> Trial:
        return Trial(self.batches[:number], self.params)


def _per_second(runs: Sequence[Run]) -> float:
    return sum(len(ids) for run in runs for ids in run.token_ids) / sum(run.seconds for run in runs)


def try_all(
    options: ModelOptions, plain: TimedModel, tried: Sequence[Setting], trial: Trial, num_runs: int
) -> list[Setting]:
    """Measure settings, in rounds that leave fewer and measure more of the prompts (successive halving; Jamieson and
    Talwalkar 2016). Returns those of the last round, the fastest first.

    Settings with which the engine decides how much is drafted skip the rounds of few prompts: there it would still be
    measuring what drafts cost. Many of them have a round of their own, of all prompts.
    """
    adaptive = [each for each in tried if each.is_adaptive]
    fixed = [each for each in tried if not each.is_adaptive]
    size = NUM_FIRST
    while len(fixed) > FEWEST and size < len(trial.batches):
        _measure(options, plain, fixed, trial.first(size), 1)
        fixed = _better(fixed)
        size *= 2
    if len(adaptive) > FEWEST and len(trial.batches) > NUM_FIRST:
        _measure(options, plain, adaptive, trial, 1)
        adaptive = _better(adaptive)
    left = [*adaptive, *fixed]
    for setting in left:
        setting.ratios.clear()
        setting.acceptance_lengths.clear()
    _measure(options, plain, left, trial, num_runs)
    return _fastest_first(left)


def _preferred(found: Sequence[Setting]) -> Setting:
    """The fastest setting or, if that may be by chance, the fastest one of those without a fixed number that are faster
    than plain decoding. found: the fastest first."""
    adaptive = [each for each in found if each.is_adaptive and each.speed_up > 1]
    return adaptive[0] if adaptive and adaptive[0].speed_up * MARGIN >= found[0].speed_up else found[0]


def _fastest_first(given: Sequence[Setting]) -> list[Setting]:
    return sorted(given, key=lambda setting: setting.speed_up, reverse=True)


def _better(given: Sequence[Setting]) -> list[Setting]:
    """Those that a round leaves."""
    return _fastest_first(given)[: max(FEWEST, round(KEPT * len(given)))]


def _measure(options: ModelOptions, plain: TimedModel, given: Sequence[Setting], trial: Trial, num_runs: int) -> None:
    """Measure each setting num_runs times. Each time the model is loaded anew: a method may remember outputs, and the
    same prompts will not come again."""
    work = [setting for setting in given for _ in range(num_runs)]
    for setting in tqdm(work, unit="run", disable=not sys.stderr.isatty()):
        with click.Context(click.get_current_context().command):  # which closes the model at its end
            model = TimedModel.load(options.with_keywords(speculative_config=setting.config))
            model.run([WARM_UP], trial.params)
            trial.measure(plain, model, setting)


@click.command("tune", cls=ModelCommand)
@model_options()
@click.option(
    "--prompts",
    "prompts_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Prompts like those that you will have, as for `bench`.  [default: built-in ones]",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Requests that run at once."
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy decoding.")
@click.option(
    "--max-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Most tokens per completion."
)
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of the last round.")
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the best configuration to this .json file, for --config.",
)
def command(
    options: ModelOptions,
    prompts_file: Path | None,
    batch_size: int,
    temperature: float,
    max_tokens: int,
    runs: int,
    output: Path | None,
) -> None:
    """Find the fastest way to speculate for a model, prompts and a number of requests at once.

    Every installed method that the model has a draft for is tried, with its defaults and with fixed numbers of draft
    tokens, alone and together. The prompts should be like those that will be served, and at least as many as run at
    once.
    """
    if options.speculative_config is not None:
        raise ConfigError("tune chooses the method by itself: leave out --method, and speculative_config of --config")
    check_writable("--output", output)
    if output is not None and output.suffix.lower() != ".json":
        raise ConfigError(f"--output {str(output)!r} is written as JSON: give it the suffix .json")
    texts = [prompt.text for prompt in (read_prompts(prompts_file) if prompts_file is not None else PROMPTS)]
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    console = make_console()
    tried, refused = settings(options)
    for name, reason in refused.items():
        console.print(f"{name} is not tried: {reason}", style="dim", markup=False)
    if not tried:
        raise ConfigError("no installed method can draft for this model: see the reasons above")
    # No prompt comes twice: a method that remembers outputs would find them.
    size = min(batch_size, len(texts))
    num_higher = min(size * HIGHER, len(texts))
    for line in _too_few(len(texts), batch_size):
        console.print(line, style="yellow", markup=False)
    plain = TimedModel.load(options)
    found = try_all(options, plain, tried, Trial(_batches(texts, size), params), runs)
    at_higher = [Setting(each.config) for each in found] if num_higher > size else []
    _measure(options, plain, at_higher, Trial(_batches(texts, num_higher), params), 1)
    table = Table(box=None, padding=(0, 2, 0, 0))
    heads = ["configuration", f"speed-up, {size} at once", "acceptance length"]
    for head in [*heads, f"{num_higher} at once"] if at_higher else heads:
        table.add_column(head, justify="left" if head == "configuration" else "right")
    for each, higher in zip_longest(found, at_higher):
        shown = [f"{each.speed_up:.2f}", f"{median(each.acceptance_lengths):.2f}"]
        table.add_row(cell(each.name), *shown, *([f"{higher.speed_up:.2f}"] if higher else []))
    console.print(table)
    best = _preferred(found)
    chosen = dict(options.keywords) | {"speculative_config": best.config if best.speed_up > 1 else None}
    console.print(_said(best, size, at_higher, num_higher), markup=False)
    if output is not None:
        write_text("--output", output, json.dumps(_without_none(chosen), indent=2) + "\n")
        console.print(f"written to {output}: spec-decode bench --config {output}", markup=False)


def _batches(texts: Sequence[str], size: int) -> list[list[str]]:
    """Batches of exactly this size: a smaller one, of the texts left over, would count as a different load."""
    return [list(texts[i : i + size]) for i in range(0, len(texts) - size + 1, size)]


def _too_few(num_prompts: int, batch_size: int) -> Iterator[str]:
    """Yield what cannot be measured with so many prompts."""
    more = "give more with --prompts"
    if num_prompts < batch_size:
        yield f"--batch-size {batch_size} needs as many prompts, and there are {num_prompts}: these run at once, {more}"
    elif left_over := num_prompts % batch_size:
        are = "is" if left_over == 1 else "are"
        yield f"{left_over} of {num_prompts} prompts {are} left out, too few for another batch of {batch_size}"
    if num_prompts <= batch_size:
        yield f"a higher load than {counted(num_prompts, 'prompt')} at once is not tried: {more}"


def _said(best: Setting, size: int, at_higher: Sequence[Setting], num_higher: int) -> str:
    """What to do, and at a higher load, if one was measured."""
    if best.speed_up <= 1:
        text = f"With {size} at once, decode plainly: no setting was faster."
    else:
        text = f"With {size} at once, use {json.dumps(best.config)}: {best.speed_up:.2f} times as fast."
    if not at_higher:
        return text
    top = max(at_higher, key=lambda setting: setting.speed_up)
    what = f"{top.name}, {top.speed_up:.2f} times as fast" if top.speed_up > 1 else "plain decoding"
    return f"{text} With {num_higher}: {what}."


def _without_none(keywords: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keywords.items() if value is not None}
