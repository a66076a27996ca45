"""Built-in prompts: edits of code that the embedded model gets right, and a check whether a result is right.

The embedded model was trained on documents that give a task, some code, and the code after the edit. It gets few of
such edits entirely right. The tasks here are among these few, but not in the training data. To compare the tasks with
that data, run `python -m training.overlap --work FOLDER` in models/tiny.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from typing import NamedTuple

from specdec_tools.files import TitledPrompt


class Task(NamedTuple):
    """An edit of Python code.

    instruction: the edit in words, in the wording of the embedded model's training data.
    code, edited: the code before and after the edit.
    """

    title: str
    instruction: str
    code: str
    edited: str

    @property
    def prompt(self) -> str:
        return f"# Task: {self.instruction}\n{self.code}\n# Result:\n"

    def is_right(self, result: str) -> bool:
        """Return whether a result has the same syntax tree and comments as the edited code. The result is not run."""
        return _syntax_and_comments(result) == _syntax_and_comments(self.edited)


def _syntax_and_comments(code: str) -> tuple[str, list[str]] | None:
    """Return the dumped syntax tree and the comments of Python code; None if the code cannot be parsed."""
    try:
        tokens = tokenize.generate_tokens(io.StringIO(code).readline)
        with warnings.catch_warnings(action="ignore"):  # of odd literals
            tree = ast.dump(ast.parse(code))
        return tree, [token.string for token in tokens if token.type == tokenize.COMMENT]
    # of a null byte, of deep nesting, and of many signs in a row
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return None


def _rename(title: str, code: str, old: str, new: str) -> Task:
    return Task(title, f"rename `{old}` to `{new}`", code, re.sub(rf"\b{old}\b", new, code))


_SHORTEST = """\
def shortest_name(people, minimum=1):
    result = None
    for person in people:
        if len(person.name) < minimum:
            continue
        if result is None or len(person.name) < len(result):
            result = person.name
    return result
"""

_TEMPERATURES = '''\
def read_temperatures(path, scale=1.0):
    """Read a file with a temperature in each line."""
    temperatures = []
    with open(path) as file:
        for line in file:
            # the last line may be empty
            if line.strip():
                temperatures.append(float(line))
    return [scale * t for t in temperatures]
'''

_COMMENT = "    # a name may have spaces\n"
_INVENTORY = f"""\
def load_inventory(path):
    inventory = {{}}
{_COMMENT}\
    with open(path) as file:
        for line in file:
            name, amount = line.rsplit(" ", 1)
            inventory[name] = int(amount)
    return inventory
"""

_SHOP = """\
class Shop:
    def __init__(self, name, hours=None):
        if hours is None:
            hours = (9, 17)
        self.name = name
        self.hours = hours

    def is_open(self, hour):
        first, last = self.hours
        return first <= hour < last

    def count_visits(self, visits):
        total = 0
        for hour in visits:
            if self.is_open(hour):
                total += 1
        return total
"""

TASKS = (
    _rename("rename a variable", _SHORTEST, "result", "group"),
    _rename("rename a parameter", _TEMPERATURES, "scale", "size"),
    Task("remove a comment", "remove the comments", _INVENTORY, _INVENTORY.replace(_COMMENT, "")),
    Task("copy a class", "repeat the code unchanged", _SHOP, _SHOP),
)

_SETTINGS = '''\
def read_settings(path, defaults=None):
    """Read a file of ``name = value`` lines into a dictionary.

    Empty lines and lines that start with ``#`` are skipped. Names that the file does not mention get their value
    from ``defaults``.
    """
'''

PROMPTS = (
    *(TitledPrompt(task.title, task.prompt, "edit") for task in TASKS),
    TitledPrompt("write a function", _SETTINGS, "write"),
)
"""For `spec-decode bench`. No drafter does as well on new text as on edits."""
