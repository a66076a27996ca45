"""Prompts of Python code that neither the embedded model nor its draft models and EAGLE heads were trained on.

The code is from the running Python's standard library, from the modules listed under `[heldout]` in
models/tiny/training/corpus.toml. A prompt ends where the body of a function begins; a docstring is part of the prompt.
It starts at the earliest top-level statement among the 40 lines before its end. At most two functions of a file are
selected, by hashes of their line numbers.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

MANIFEST = Path(__file__).parents[1] / "models" / "tiny" / "training" / "corpus.toml"
MOST_OF_FILE = 2
MOST_LINES, FEWEST_LINES = 40, 10
FEWEST_LINES_OF_BODY = 6  # that the model has to write


def write_prompts(file: Path) -> None:
    """Write the prompts to a .jsonl file. The object in each line has the keys `task_id` and `prompt`."""
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts()), encoding="utf-8")


def texts() -> Iterator[str]:
    return (prompt["prompt"] for prompt in prompts())


def prompts() -> Iterator[dict[str, str]]:
    library = Path(sysconfig.get_path("stdlib"))
    for name in tomllib.loads(MANIFEST.read_text(encoding="utf-8"))["heldout"]["stdlib"]:
        for path in sorted((library / name).glob("*.py")) or [library / name]:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            found = sorted(places("".join(lines)), key=lambda place: hashlib.sha256(str(place).encode()).digest())
            for begin, end in sorted(found[:MOST_OF_FILE]):
                task_id = f"{path.relative_to(library).as_posix()}:{end}"
                yield {"task_id": task_id, "prompt": "".join(lines[begin - 1 : end - 1])}


def places(source: str) -> Iterator[tuple[int, int]]:
    """Yield the lines of every possible prompt in a Python file as a range [begin, end), counted from 1.

    source: the file's text.
    """
    module = ast.parse(source)
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef):
            continue
        first = node.body[0]
        end = first.end_lineno + 1 if ast.get_docstring(node) is not None else first.lineno
        begins = [each.lineno for each in module.body if end - MOST_LINES <= each.lineno <= node.lineno]
        if begins and end - begins[0] >= FEWEST_LINES and node.end_lineno - end >= FEWEST_LINES_OF_BODY:
            yield begins[0], end
