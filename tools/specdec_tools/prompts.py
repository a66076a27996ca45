"""Prompts for `spec-decode demo` and `bench`: from a file, or built-in Python prompts for the embedded model.

The embedded model was trained on edits in documents that give a task, the code, and the code after the edit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from specdec_core.config.fields import shown
from specdec_core.errors import ConfigError


class TitledPrompt(NamedTuple):
    title: str
    text: str
    group: str  # prompts of one kind, reported together


def read_prompts(path: Path) -> list[TitledPrompt]:
    """Read prompts from a file: one per non-blank line or, in a .jsonl file, one JSON object per line.

    The object's keys are `prompt`, `group` (optional) and `task_id` (optional, the title); others are ignored.

    Raises ConfigError with the file and line that cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"prompts file {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts file {str(path)!r} is not UTF-8 text: byte {error.start}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"prompts file {str(path)!r} has no prompts: write one in each line")
    if path.suffix.lower() != ".jsonl":
        return [TitledPrompt(f"line {number}", line, path.name) for number, line in numbered]
    return [_from_json(line, f"prompts file {str(path)!r}, line {number}", number) for number, line in numbered]


def _from_json(line: str, where: str, number: int) -> TitledPrompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    values = record if isinstance(record, dict) else {}
    prompt, group, title = values.get("prompt"), values.get("group", "all"), values.get("task_id", f"line {number}")
    if not all(isinstance(text, str) for text in (prompt, group, title)) or not prompt:
        raise ConfigError(
            f"{where} is {shown(line, 60)}: give an object with a text as prompt, and as group and task_id if it has "
            f"them"
        )
    return TitledPrompt(title, prompt, group)


def _edit(task: str, code: str) -> str:
    return f"# Task: {task}\n{code}\n# Result:\n"


_SHELF = '''\
class Shelf:
    """Books in order of their year."""

    def __init__(self, limit):
        self.limit = limit
        self.books = []

    def add(self, title, year):
        if len(self.books) >= self.limit:
            raise ValueError("the shelf is full")
        position = 0
        while position < len(self.books) and self.books[position][1] <= year:
            position += 1
        self.books.insert(position, (title, year))

    def between(self, first, last):
        found = []
        for title, year in self.books:
            if first <= year <= last:
                found.append(title)
        return found
'''

_AVERAGES = '''\
def daily_averages(readings, minimum=0):
    """Average the readings of each day.

    Readings below the minimum are left out.
    """
    sums = {}
    counts = {}
    for day, value in readings:
        if value < minimum:
            continue
        sums[day] = sums.get(day, 0) + value
        counts[day] = counts.get(day, 0) + 1
    averages = {}
    for day in sorted(sums):
        averages[day] = sums[day] / counts[day]
    return averages
'''

_ROUTE = """\
def find_route(roads, start, goal):
    # breadth first, so the first route found has the fewest roads
    waiting = [start]
    came_from = {start: None}
    while waiting:
        place = waiting.pop(0)
        if place == goal:
            break
        for neighbor in roads.get(place, []):
            # each place is visited once
            if neighbor not in came_from:
                came_from[neighbor] = place
                waiting.append(neighbor)
    if goal not in came_from:
        return None
    # walk back from the goal
    route = [goal]
    while came_from[route[-1]] is not None:
        route.append(came_from[route[-1]])
    return route[::-1]
"""

_COMPLETION = '''\
def read_settings(path, defaults=None):
    """Read a file of ``name = value`` lines into a dictionary.

    Empty lines and lines that start with ``#`` are skipped. Names that the file does not mention get their value
    from ``defaults``.
    """
'''

PROMPTS = (
    TitledPrompt("rename a variable", _edit("rename `value` to `amount`", _AVERAGES), "edit"),
    TitledPrompt("repeat a class", _edit("repeat the code unchanged", _SHELF), "edit"),
    TitledPrompt("remove the comments", _edit("remove the comments", _ROUTE), "edit"),
    TitledPrompt("write a function", _COMPLETION, "write"),
)
