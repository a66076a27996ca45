"""Prompts for benchmarks: code to edit, whose completion repeats the prompt, and code to continue, which does not."""

from __future__ import annotations

import json
from pathlib import Path

INVENTORY = '''class Inventory:
    """Counts of the parts in a warehouse."""

    def __init__(self, limit=100):
        self.limit = limit
        self.counts = {}

    def add(self, part, amount=1):
        if amount < 1:
            raise ValueError("amount must be positive")
        total = sum(self.counts.values()) + amount
        if total > self.limit:
            raise ValueError("the warehouse is full")
        self.counts[part] = self.counts.get(part, 0) + amount

    def remove(self, part, amount=1):
        available = self.counts.get(part, 0)
        if amount > available:
            raise KeyError(part)
        self.counts[part] = available - amount
        if self.counts[part] == 0:
            del self.counts[part]

    def report(self):
        lines = []
        for part in sorted(self.counts):
            lines.append(f"{part}: {self.counts[part]}")
        return "\\n".join(lines)
'''

PARSER = """def parse_settings(path, encoding="utf-8"):
    settings = {}
    section = None
    with open(path, encoding=encoding) as stream:
        for number, line in enumerate(stream, start=1):
            line = line.strip()
            # Blank lines and comments say nothing.
            if not line or line.startswith("#"):
                continue
            if line.startswith("[") and line.endswith("]"):
                section = line[1:-1]
                settings.setdefault(section, {})
                continue
            name, separator, value = line.partition("=")
            if not separator:
                raise ValueError(f"line {number}: expected name = value")
            if section is None:
                raise ValueError(f"line {number}: a section must come first")
            settings[section][name.strip()] = value.strip()
    return settings
"""

MATRIX = """def multiply(left, right):
    rows, inner, columns = len(left), len(right), len(right[0])
    if any(len(row) != inner for row in left):
        raise ValueError("shapes do not fit")
    result = [[0] * columns for _ in range(rows)]
    for i in range(rows):
        for j in range(columns):
            total = 0
            for k in range(inner):
                total += left[i][k] * right[k][j]
            result[i][j] = total
    return result


def identity(size):
    return [[1 if i == j else 0 for j in range(size)] for i in range(size)]


def power(matrix, exponent):
    result = identity(len(matrix))
    while exponent > 0:
        if exponent % 2 == 1:
            result = multiply(result, matrix)
        matrix = multiply(matrix, matrix)
        exponent //= 2
    return result
"""

CACHE = """class TimedCache:
    def __init__(self, seconds: float = 60.0, size: int = 128) -> None:
        self.seconds = seconds
        self.size = size
        self._entries: dict[str, tuple[float, object]] = {}

    def get(self, key: str, default: object = None) -> object:
        entry = self._entries.get(key)
        if entry is None:
            return default
        created, value = entry
        if time.monotonic() - created > self.seconds:
            del self._entries[key]
            return default
        return value

    def put(self, key: str, value: object) -> None:
        if len(self._entries) >= self.size:
            oldest = min(self._entries, key=lambda name: self._entries[name][0])
            del self._entries[oldest]
        self._entries[key] = (time.monotonic(), value)
"""

EDITS = {
    "repeat": ("repeat the code unchanged", INVENTORY),
    "rename in a class": ("rename `amount` to `quantity`", INVENTORY),
    "replace a number": ("replace the number 100 with 256", INVENTORY),
    "remove comments": ("remove the comments", PARSER),
    "rename in a function": ("rename `settings` to `options`", PARSER),
    "rename a parameter": ("rename `matrix` to `values`", MATRIX),
    "repeat functions": ("repeat the code unchanged", MATRIX),
    "remove type hints": ("remove the type hints", CACHE),
}

OPENINGS = {
    "function": 'def median(values):\n    """Return the middle value of a sequence of numbers."""\n',
    "class": 'class Stack:\n    """A last-in first-out collection."""\n\n    def __init__(self):\n',
    "test": "import unittest\n\n\nclass TestRomanNumerals(unittest.TestCase):\n    def test_small(self):\n",
    "script": "import argparse\nimport sys\n\n\ndef main(argv=None):\n    parser = argparse.ArgumentParser(",
    "recursion": 'def flatten(nested):\n    """Yield the leaves of a nested list, from left to right."""\n',
    "file": "import csv\nfrom pathlib import Path\n\n\ndef read_rows(path):\n",
    "iterator": 'class Countdown:\n    """Iterate from a number down to one."""\n\n    def __iter__(self):\n',
    "decorator": "import functools\nimport logging\n\n\ndef logged(function):\n    @functools.wraps(function)\n",
}

ALIKE = [  # class, place, what is counted
    ("Inventory", "warehouse", "part"),
    ("Pantry", "kitchen", "food"),
    ("Library", "building", "book"),
    ("Garage", "yard", "car"),
    ("Toolbox", "workshop", "tool"),
    ("Cellar", "basement", "bottle"),
    ("Archive", "office", "file"),
    ("Stable", "farm", "horse"),
    ("Fleet", "harbour", "boat"),
    ("Gallery", "museum", "picture"),
]


def edit_prompts() -> dict[str, str]:
    """Return prompts that ask for an edit of given code, {name: text}.

    They have the format of the edits in the embedded model's training data, which contains none of this code.
    """
    return {name: f"# Task: {task}\n{code}\n# Result:\n" for name, (task, code) in EDITS.items()}


def plain_prompts() -> dict[str, str]:
    return dict(OPENINGS)


def read_prompts(path: Path) -> dict[str, str]:
    """Read a JSONL file with `id` and `prompt` on each line. Returns {id: prompt}."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {str(record["id"]): record["prompt"] for record in records}


def renames_alike() -> dict[str, str]:
    """Return prompts with the same renaming task for ten classes that differ in a few names and a number.

    The keys of the dict are "1" to "10".
    """
    prompts = {}
    for i, (name, place, part) in enumerate(ALIKE, start=1):
        code = INVENTORY.replace("Inventory", name).replace("warehouse", place).replace("part", part)
        code = code.replace("100", str(50 * i))
        prompts[str(i)] = f"# Task: rename `amount` to `quantity`\n{code}\n# Result:\n"
    return prompts


def removals_alike() -> dict[str, str]:
    """Return prompts with the task to remove the type hints from ten classes that differ in a few names and a number.

    The keys of the dict are "1" to "10".
    """
    return {
        str(i): "# Task: remove the type hints\n"
        + CACHE.replace("TimedCache", f"{name}Cache").replace("entry", part).replace("60.0", f"{i}.5")
        + "\n# Result:\n"
        for i, (name, _, part) in enumerate(ALIKE, start=1)
    }


def functions_alike() -> dict[str, str]:
    """Return prompts with the first lines of ten functions that differ in a noun: `median_part`, `median_food`.

    The keys of the dict are "1" to "10". The functions' bodies are in none of the prompts.
    """
    return {
        str(i): f'def median_{part}(values):\n    """Return the middle {part} of a sequence of numbers."""\n'
        for i, (_, _, part) in enumerate(ALIKE, start=1)
    }


def readers_alike() -> dict[str, str]:
    """Return prompts with the first lines of ten functions that read different files: `read_parts`, `read_foods`.

    The keys of the dict are "1" to "10". The functions' bodies are in none of the prompts.
    """
    return {
        str(i): f"import csv\nfrom pathlib import Path\n\n\ndef read_{part}s(path):\n"
        for i, (_, _, part) in enumerate(ALIKE, start=1)
    }
