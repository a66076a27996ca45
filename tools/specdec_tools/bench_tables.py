"""The tables that `spec-decode bench` prints. Each fits into 80 columns, and is preceded by what was run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_core.cli.screen import printable
from specdec_core.engine.metrics import DraftCounts
from specdec_tools.acceptance import context_title
from specdec_tools.advice import advice
from specdec_tools.figures import Figures
from specdec_tools.latencies import PERCENTILES
from specdec_tools.results import Result

LATENCIES = {"time_to_first_token": "time to first token", "inter_token": "inter-token", "end_to_end": "end-to-end"}

Rows = Sequence[tuple[str, Figures]]
"""The name and the figures of each group of prompts or of each load, then those of all batches."""

TOTAL = "total"


def print_results(results: Sequence[Result]) -> None:
    """Print the tables of each configuration, what they advise and, of several configurations, one that compares
    them."""
    console = Console(highlight=False)
    for result in results:
        for table in _tables(result):
            console.print(printable(str(result.ran)), markup=False)
            console.print(table)
            console.print()
        for line in advice(result):
            console.print(printable(line) + "\n", markup=False)
    if len(results) > 1:
        for result in results:
            console.print(printable(str(result.ran)), markup=False)
        console.print(compared(results))


def _tables(result: Result) -> Iterator[Table]:
    total = result.total
    rows = [*result.figures.items(), *([] if result.loads else [(TOTAL, total)])]
    first = "load" if result.loads else "prompts"
    yield times(rows, first)
    yield users(rows)
    yield drafts(rows, first)
    if result.loads and len(total.groups) > 1:
        yield acceptance("prompts", total.groups)
    if total.contexts:
        yield acceptance("context", {context_title(start): counts for start, counts in total.contexts.items()})
    yield costs(rows, result.ran.num_speculative_tokens)
    yield latencies(rows if result.loads else [(TOTAL, total)])


def times(rows: Rows, first: str) -> Table:
    """Tokens per second, plain and speculative, and what the drafts did."""
    columns = ["\ntokens", "plain\ntokens/s", "drafted\ntokens/s", "\nspeed-up", "acceptance\nlength"]
    columns += ["time\ndrafts", "effi-\nciency", "same\noutput"]
    return _filled(_table(f"\n{first}", columns), rows, _times)


def _times(figures: Figures) -> tuple[str, ...]:
    efficiency = "" if figures.efficiency is None else f"{figures.efficiency:.2f}"
    return *figures.cells(), f"{figures.drafting_share:.1%}", efficiency, "yes" if figures.is_identical else "no"


def users(rows: Rows) -> Table:
    """Tokens per second that a user gets, against those of all users together."""
    columns = [f"{who}\n{what}" for who in ("all users", "a user") for what in ("plain", "drafted", "speed-up")]

    def cells(figures: Figures) -> tuple[str, ...]:
        plain, drafted = figures.plain_latencies.user_tokens_per_s, figures.latencies.user_tokens_per_s
        together = f"{figures.plain_tokens_per_s:.1f}", f"{figures.tokens_per_s:.1f}", f"{figures.speed_up:.2f}x"
        return *together, f"{plain:.1f}", f"{drafted:.1f}", f"{figures.user_speed_up:.2f}x" if plain else ""

    return _filled(_table("\ntokens/s", columns), rows, cells)


def drafts(rows: Rows, first: str) -> Table:
    """How many draft tokens were accepted, and how much of it was repetition."""
    table = _table(f"\n{first}", ["acceptance\nlength", "of unlooped\ntext", "unlooped\ntokens", "distinct\n4-grams"])
    table.add_column("drafts accepted up to\npositions 1, 2, 3 ...")
    return _filled(table, rows, _drafts)


def _drafts(figures: Figures) -> tuple[str, ...]:
    lengths = (f"{d.acceptance_length:.2f}" if d.num_drafts else "" for d in (figures.drafts, figures.unlooped))
    distinct = "" if figures.distinct_ngrams is None else f"{figures.distinct_ngrams:.1%}"
    return *lengths, f"{figures.num_unlooped / max(1, figures.num_tokens):.1%}", distinct, _rates(figures.drafts)


def _rates(counts: DraftCounts) -> str:
    return " ".join(f"{rate:.2f}" for rate in counts.acceptance_rate_per_pos)


def acceptance(first: str, counts: Mapping[str, DraftCounts]) -> Table:
    """Acceptance by something else than the rows of the other tables. first: what that is."""
    table = _table(f"\n{first}", ["\ndrafts", "acceptance\nlength"])
    table.add_column("drafts accepted up to\npositions 1, 2, 3 ...")
    for name, own in counts.items():
        table.add_row(Text(name), str(own.num_drafts), f"{own.acceptance_length:.2f}", _rates(own))
    return table


def costs(rows: Rows, num_speculative_tokens: int) -> Table:
    """What a step costs, in forward passes of plain decoding, and what speed-up these costs allow."""
    columns = ["block\nefficiency", "with a\ndraft", "draft\ntoken", "\ndrafting", "verifi-\ncation", "output\ntoken"]
    table = _table("in forward passes\nof plain decoding", [*columns, "memory-\nbound"])

    def cells(figures: Figures) -> tuple[str, ...]:
        costs = figures.costs
        if costs is None:
            return ()
        times = (f"{time:.2f}" for time in (costs.drafting, costs.verification, costs.token))
        block_efficiency = f"{costs.block_efficiency:.2f} ({num_speculative_tokens + 1})"
        draft_token = "" if costs.draft_token is None else f"{costs.draft_token:.3f}"
        bound = f"{costs.memory_bound_speed_up:.2f}x"
        return block_efficiency, f"{costs.drafted_share:.0%}", draft_token, *times, bound

    return _filled(table, rows, cells)


def latencies(rows: Rows) -> Table:
    """Percentiles of what users wait for, over the completions of all runs."""
    table = _table("\nlatency in ms", [f"{who}\nP{p}" for who in ("plain", "drafted") for p in PERCENTILES])
    for row, figures in rows:
        if len(rows) > 1:
            table.add_row(Text(row))
        both = figures.plain_latencies.percentiles(), figures.latencies.percentiles()
        for name, shown in LATENCIES.items():
            times = [time for found in both for time in found[name] or (None,) * len(PERCENTILES)]
            table.add_row(shown, *("" if time is None else f"{1000 * time:.1f}" for time in times))
    return table


def compared(results: Sequence[Result]) -> Table:
    """The configurations beside each other, for each row."""
    columns = ["all users\ntokens/s", "\nspeed-up", "a user\ntokens/s", "\nspeed-up", "acceptance\nlength"]
    table = _table("\nconfiguration", columns)
    rows = [TOTAL] if not results[0].loads else [*results[0].rows]
    for row in rows:
        if len(rows) > 1:
            table.add_row(Text(row))
        found = [(each, each.total if row == TOTAL else each.figures[row]) for each in results]
        plain = found[0][1]
        speeds = f"{plain.plain_tokens_per_s:.1f}", "", f"{plain.plain_latencies.user_tokens_per_s:.1f}", "", ""
        table.add_row("plain", *speeds)
        for result, figures in found:
            together = f"{figures.tokens_per_s:.1f}", f"{figures.speed_up:.2f}x"
            alone = f"{figures.latencies.user_tokens_per_s:.1f}", f"{figures.user_speed_up:.2f}x"
            table.add_row(Text(result.ran.name), *together, *alone, f"{figures.drafts.acceptance_length:.2f}")
    return table


def _table(first: str, others: Sequence[str]) -> Table:
    """Return a table with a column of names and columns of figures."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, justify="right")
    return table


def _filled(table: Table, rows: Rows, cells: Callable[[Figures], tuple[str, ...]]) -> Table:
    for row, figures in rows:
        table.add_row(Text(row), *cells(figures))
    return table
