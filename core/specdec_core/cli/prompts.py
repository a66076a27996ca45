"""What `spec-decode demo` completes: Python, as the embedded model was trained on it.

The model has learnt to edit from documents that state a task, show the code, and show it again after the edit.
"""

from __future__ import annotations

from typing import NamedTuple


class DemoPrompt(NamedTuple):
    title: str
    text: str


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
        for neighbour in roads.get(place, []):
            # each place is visited once
            if neighbour not in came_from:
                came_from[neighbour] = place
                waiting.append(neighbour)
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
    DemoPrompt("rename a variable", _edit("rename `value` to `amount`", _AVERAGES)),
    DemoPrompt("repeat a class", _edit("repeat the code unchanged", _SHELF)),
    DemoPrompt("remove the comments", _edit("remove the comments", _ROUTE)),
    DemoPrompt("write a function", _COMPLETION),
)
