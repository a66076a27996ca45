"""Tables of results, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

NOTES = ("error", "skipped")


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table, then those of what was not measured.

    columns: the results to show. What else a row has says what was measured, but for lists and dicts.
    """
    measured = [row for row in rows if not any(note in row for note in NOTES)]
    alike = [row for row in measured if any(column in row for column in columns)]
    labels = dict.fromkeys(key for row in alike for key in row if key not in columns and _is_short(row[key]))
    known = (column for column in columns if any(row.get(column) is not None for row in alike))
    shown = [*labels, *(column for column in known if not any(isinstance(row.get(column), dict) for row in alike))]
    cells = [shown, *([_text(row.get(key)) for key in shown] for row in alike)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells if alike else ():
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
    yield from (_line(row) for row in measured if row not in alike)
    yield from (_line(row) for row in rows if "error" in row)
    skipped = [row for row in rows if "skipped" in row]
    if skipped:
        yield f"{len(skipped)} not measured, since {skipped[0]['skipped']}: {_line(skipped[0], NOTES)} and what follows"


def _line(row: dict[str, Any], left_out: Sequence[str] = ()) -> str:
    return ", ".join(f"{key} {_text(value)}" for key, value in row.items() if key not in left_out)


def _is_short(value: Any) -> bool:
    return not isinstance(value, list | dict)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return " ".join(map(_text, value)) or "none" if isinstance(value, list) else str(value)
