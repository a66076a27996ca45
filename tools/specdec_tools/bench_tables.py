"""The tables that `spec-decode bench` prints. Each fits into 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from specdec_tools.figures import Figures
from specdec_tools.latencies import PERCENTILES

LATENCIES = {"time_to_first_token": "time to first token", "inter_token": "inter-token", "end_to_end": "end-to-end"}


Groups = Mapping[str, Figures]
"""The figures of each group of prompts."""


def times(groups: Groups, total: Figures) -> Table:
    """Tokens per second of each group of prompts, plain and speculative, and what the drafts did."""
    columns = ["\ntokens", "plain\ntokens/s", "drafted\ntokens/s", "\nspeed-up", "acceptance\nlength"]
    columns += ["time\ndrafts", "\nefficiency", "same\noutput"]
    return _filled(_table("\nprompts", columns), groups, total, _times)


def _times(figures: Figures) -> tuple[str, ...]:
    efficiency = "" if figures.efficiency is None else f"{figures.efficiency:.2f}"
    return *figures.cells(), f"{figures.drafting_share:.1%}", efficiency, "yes" if figures.is_identical else "no"


def drafts(groups: Groups, total: Figures) -> Table:
    """How many draft tokens were accepted, and how much of it was repetition."""
    table = _table("\nprompts", ["acceptance\nlength", "of unlooped\ntext", "unlooped\ntokens", "distinct\n4-grams"])
    table.add_column("drafts accepted up to\npositions 1, 2, 3 ...")
    return _filled(table, groups, total, _drafts)


def _drafts(figures: Figures) -> tuple[str, ...]:
    lengths = (f"{d.acceptance_length:.2f}" if d.num_drafts else "" for d in (figures.drafts, figures.unlooped))
    distinct = "" if figures.distinct_ngrams is None else f"{figures.distinct_ngrams:.1%}"
    rates = " ".join(f"{rate:.2f}" for rate in figures.drafts.acceptance_rate_per_pos)
    return *lengths, f"{figures.num_unlooped / max(1, figures.num_tokens):.1%}", distinct, rates


def costs(groups: Groups, total: Figures, num_speculative_tokens: int) -> Table:
    """What a step costs, in forward passes of plain decoding, and what speed-up these costs allow."""
    columns = ["block efficiency\n(most of chains)", "\ndrafting", "\nverification", "an output\ntoken"]
    table = _table("in forward passes\nof plain decoding", [*columns, "memory-bound\nspeed-up"])

    def cells(figures: Figures) -> tuple[str, ...]:
        costs = figures.costs
        if costs is None:
            return ()
        times = (f"{time:.2f}" for time in (costs.drafting, costs.verification, costs.token))
        block_efficiency = f"{costs.block_efficiency:.2f} ({num_speculative_tokens + 1})"
        return block_efficiency, *times, f"{costs.memory_bound_speed_up:.2f}x"

    return _filled(table, groups, total, cells)


def latencies(total: Figures) -> Table:
    """Percentiles of what users wait for, over the completions of all runs."""
    table = _table("\nlatency in ms", [f"{who}\nP{p}" for who in ("plain", "drafted") for p in PERCENTILES])
    both = total.plain_latencies.percentiles(), total.latencies.percentiles()
    for name, shown in LATENCIES.items():
        times = [time for found in both for time in found[name] or (None,) * len(PERCENTILES)]
        table.add_row(shown, *("" if time is None else f"{1000 * time:.1f}" for time in times))
    return table


def _table(first: str, others: Sequence[str]) -> Table:
    """Return a table with a column of names and columns of figures."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, justify="right")
    return table


def _filled(table: Table, groups: Groups, total: Figures, cells: Callable[[Figures], tuple[str, ...]]) -> Table:
    for group, figures in groups.items():
        table.add_row(Text(group), *cells(figures))
    table.add_row("total", *cells(total))
    return table
