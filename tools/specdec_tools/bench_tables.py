"""The tables that `spec-decode bench` prints. Each fits into 80 columns."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from specdec_tools.compare import Figures
from specdec_tools.latencies import PERCENTILES
from specdec_tools.step_costs import StepCosts

LATENCIES = {"time_to_first_token": "time to first token", "inter_token": "inter-token", "end_to_end": "end-to-end"}


def times(by_group: Mapping[str, Figures], total: Figures) -> Table:
    """Tokens per second of each group of prompts, plain and speculative, and what the drafts did."""
    table = Table(box=None, padding=(0, 1, 0, 0))  # fits into 80 columns
    table.add_column("\nprompts", no_wrap=True)
    for column in (
        *("\ntokens", "plain\ntokens/s", "drafted\ntokens/s", "\nspeed-up", "acceptance\nlength"),
        *("time\ndrafts", "\nefficiency", "same\noutput"),
    ):
        table.add_column(column, justify="right")
    for group, figures in by_group.items():
        table.add_row(Text(group), *_cells(figures))
    table.add_row("total", *_cells(total))
    return table


def _cells(figures: Figures) -> tuple[str, ...]:
    efficiency = "" if figures.efficiency is None else f"{figures.efficiency:.2f}"
    return *figures.cells(), f"{figures.drafting_share:.1%}", efficiency, "yes" if figures.is_identical else "no"


def drafts(by_group: Mapping[str, Figures], total: Figures) -> Table:
    """How many draft tokens were accepted, and how much of it was repetition."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("\nprompts", no_wrap=True)
    for column in ("acceptance\nlength", "of unlooped\ntext", "unlooped\ntokens", "distinct\n4-grams"):
        table.add_column(column, justify="right")
    table.add_column("drafts accepted up to\npositions 1, 2, 3 ...")
    for group, figures in by_group.items():
        table.add_row(Text(group), *_draft_cells(figures))
    table.add_row("total", *_draft_cells(total))
    return table


def _draft_cells(figures: Figures) -> tuple[str, ...]:
    lengths = (f"{d.acceptance_length:.2f}" if d.num_drafts else "" for d in (figures.drafts, figures.unlooped))
    distinct = "" if figures.distinct_ngrams is None else f"{figures.distinct_ngrams:.1%}"
    rates = " ".join(f"{rate:.2f}" for rate in figures.drafts.acceptance_rate_per_pos)
    return *lengths, f"{figures.num_unlooped / max(1, figures.num_tokens):.1%}", distinct, rates


def costs(by_group: Mapping[str, Figures], total: Figures, num_speculative_tokens: int) -> Table:
    """What a step costs, in forward passes of plain decoding, and what speed-up these costs allow."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("in forward passes\nof plain decoding", no_wrap=True)
    for column in ("block efficiency\n(most of chains)", "\ndrafting", "\nverification", "an output\ntoken"):
        table.add_column(column, justify="right")
    table.add_column("memory-bound\nspeed-up", justify="right")
    for group, figures in by_group.items():
        table.add_row(Text(group), *_cost_cells(figures.costs, num_speculative_tokens))
    table.add_row("total", *_cost_cells(total.costs, num_speculative_tokens))
    return table


def _cost_cells(costs: StepCosts | None, num_speculative_tokens: int) -> tuple[str, ...]:
    if costs is None:
        return ("",) * 5
    figures = (costs.drafting, costs.verification, costs.token)
    block_efficiency = f"{costs.block_efficiency:.2f} ({num_speculative_tokens + 1})"
    return block_efficiency, *(f"{figure:.2f}" for figure in figures), f"{costs.memory_bound_speed_up:.2f}x"


def latencies(total: Figures) -> Table:
    """Percentiles of what users wait for, over the completions of all runs."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("\nlatency in ms", no_wrap=True)
    for who in ("plain", "drafted"):
        for percent in PERCENTILES:
            table.add_column(f"{who}\nP{percent}", justify="right")
    plain, drafted = total.plain_latencies.percentiles(), total.latencies.percentiles()
    for name, shown in LATENCIES.items():
        cells = (plain[name] or ("",) * len(PERCENTILES), drafted[name] or ("",) * len(PERCENTILES))
        table.add_row(
            shown, *(cell if isinstance(cell, str) else f"{1000 * cell:.1f}" for each in cells for cell in each)
        )
    return table
