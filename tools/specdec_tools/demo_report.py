"""The report of `spec-decode demo`: checks whether results are right, and shows them as a table and a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen
from rich.console import Console
from rich.table import Table
from rich.terminal_theme import MONOKAI

from specdec_core.cli.screen import printable
from specdec_tools.compare import Comparison, first_difference
from specdec_tools.figures import Figures
from specdec_tools.tasks import Task

if TYPE_CHECKING:
    from specdec_core import Piece

ACCEPTED = "bold green"
EXPLANATION = "Times are medians. unlooped: acceptance length until an output repeats itself."
WIDTH = 92
"""Characters of a line of the picture."""


@frozen
class Answer:
    """The tokens that plain and speculative decoding streamed for one task, with their text."""

    task: Task
    plain: Sequence[Piece]
    speculative: Sequence[Piece]

    @property
    def title(self) -> str:
        return self.task.title

    @property
    def is_right(self) -> bool:
        return self.task.is_right("".join(piece.text for piece in self.speculative))

    @property
    def first_difference(self) -> int | None:
        """The first position at which plain and speculative output have different tokens; None if they are equal."""
        return first_difference([[piece.token_id for piece in pieces] for pieces in (self.plain, self.speculative)])


def table(answers: Sequence[Answer], timed: Sequence[Comparison], method: str) -> Table:
    """Make the table of results: a row for each task, one for all tasks, and one for all tasks at temperature 1.

    timed: a comparison of plain with speculative decoding for each task, and then that of all at temperature 1.
    method: name of the speculative method, for the heading of its column.
    """
    found = Table(box=None, padding=(0, 1, 0, 0))  # fits into 80 columns
    found.add_column("\ntask", no_wrap=True)
    for column in (
        *("\nresult", "\ntokens", "plain\ntokens/s", f"{method}\ntokens/s", "\nspeed-up"),
        *("acceptance\nlength", "\nunlooped"),
    ):
        found.add_column(column, justify="right")
    *alone, at_1 = timed
    for answer, comparison in zip(answers, alone, strict=True):
        found.add_row(answer.title, "right" if answer.is_right else "wrong", *_cells(comparison))
    found.add_section()
    found.add_row("all", "", *_cells(*alone))
    found.add_row(at_1.title, "", *_cells(at_1))
    return found


def _cells(*comparisons: Comparison) -> tuple[str, ...]:
    figures = Figures.of(*comparisons)
    unlooped = f"{figures.unlooped.acceptance_length:.2f}" if figures.unlooped.num_drafts else ""
    return *figures.cells(), unlooped


def picture(answer: Answer, figures: Table, method: str) -> str:
    """Return an SVG image of one answer and the table of results. It embeds no fonts: the viewer's own fonts are used.

    figures: the table of results.
    method: name of the speculative method, for the caption.
    """
    console = Console(
        record=True,
        file=io.StringIO(),
        width=WIDTH,
        height=100,  # without one, rich takes the width of the environment's terminal
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    console.out(answer.task.prompt, style="dim", end="")
    for piece in answer.speculative:
        console.out(printable(piece.text), style=ACCEPTED if piece.is_draft else None, end="")
    console.out("")
    console.out("green: ", style=ACCEPTED, end="")
    same = " Plain decoding writes the same tokens." if answer.first_difference is None else ""
    console.out(f"drafted by {method} and accepted.{same}\n", style="dim")
    console.print(figures)
    return console.export_svg(title="spec-decode demo", code_format=SVG, theme=MONOKAI, unique_id="demo")


SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
