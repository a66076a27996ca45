"""The plot of `spec-decode bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specdec_tools.figures import Figures
from specdec_tools.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(results: Sequence[Result], path: Path) -> None:
    """Plot speed and acceptance, and write what was run above it.

    Of batches, the speed-up of each. Of loads, tokens per second of a user against those of all users. Beside it, the
    acceptance rate at each position of a draft.
    """
    from matplotlib.figure import Figure

    num_bars = sum(len(comparisons) for comparisons in results[0].rows.values())
    is_load = bool(results[0].loads)
    num_lines = sum(1 + len(str(result.ran)) // 150 for result in results)
    num_panels = 1 if is_load else len(results)
    height = num_panels * (4.0 if is_load else max(3.0, 0.3 * num_bars + 1.2)) + 0.25 * num_lines
    figure = Figure(figsize=(11, height), layout="constrained")
    panels = figure.subplots(num_panels, 2, squeeze=False)
    if is_load:
        _draw_loads(results, panels[0][0])
        _draw_acceptance(results, panels[0][1])
    else:
        for result, (left, right) in zip(results, panels, strict=True):
            _draw_speed_ups(result, left)
            _draw_acceptance([result], right)
    heading = figure.suptitle("\n".join(str(result.ran) for result in results), fontsize="small", wrap=True)
    heading.set_parse_math(False)  # names may have dollar signs
    figure.savefig(path, dpi=110)


def _draw_speed_ups(result: Result, axes: Axes) -> None:
    bars = [(group, c.title, Figures.of(c).speed_up) for group, each in result.rows.items() for c in each]
    places = range(len(bars))
    for index, group in enumerate(result.rows):
        own = [place for place in places if bars[place][0] == group]
        axes.barh(own, [bars[place][2] for place in own], color=f"C{index % 10}", label=group.lstrip("_"))
    axes.set_yticks(places, [title for _, title, _ in bars])
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"speed-up by {result.ran.name} over plain decoding")
    for text in (*axes.get_yticklabels(), *axes.legend().get_texts(), axes.xaxis.label):
        text.set_parse_math(False)


def _draw_loads(results: Sequence[Result], axes: Axes) -> None:
    first = [*results[0].figures.values()]
    plain = [(each.plain_tokens_per_s, each.plain_latencies.user_tokens_per_s) for each in first]
    lines = {"plain": plain} | {
        result.ran.name: [(each.tokens_per_s, each.latencies.user_tokens_per_s) for each in result.figures.values()]
        for result in results
    }
    for name, points in lines.items():
        together, alone = zip(*points, strict=True)
        axes.plot(together, alone, marker="o", label=name.lstrip("_"))
        for load, point in zip(results[0].rows, points, strict=True):
            axes.annotate(load, point, fontsize="x-small", xytext=(3, 3), textcoords="offset points")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens/s of all users together")
    axes.set_ylabel("tokens/s of a user")
    for text in axes.legend().get_texts():
        text.set_parse_math(False)


def _draw_acceptance(results: Sequence[Result], axes: Axes) -> None:
    width, num_positions = 0.8 / len(results), 0
    for index, result in enumerate(results):
        rates = result.total.drafts.acceptance_rate_per_pos
        num_positions = max(num_positions, len(rates))
        places = [position + 1 + (index - (len(results) - 1) / 2) * width for position in range(len(rates))]
        axes.bar(places, rates, width, label=result.ran.name.lstrip("_"), color=f"C{(index + 1) % 10}")
    axes.set_xticks(range(1, num_positions + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted share of the drafts")
    if len(results) > 1:
        for text in axes.legend().get_texts():
            text.set_parse_math(False)
