"""The Python packages of this repository, as their pyproject.toml files describe them."""

from __future__ import annotations

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@cache
def files() -> list[str]:
    """Paths of all files that git does not ignore, relative to ROOT."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


FOLDERS = {
    tomllib.loads((ROOT / name).read_text())["project"]["name"]: (ROOT / name).parent
    for name in files()
    if name.endswith("/pyproject.toml") and not name.startswith("examples/")
}
"""{name of a distribution: its folder}, without the root and without the examples, which stand for other authors'."""


def pyproject(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def package_of(distribution: str) -> str:
    """Return the name under which a distribution is imported."""
    return distribution.replace("-", "_")


def with_dependencies(distributions: tuple[str, ...]) -> set[str]:
    """Return the distributions and, recursively, all distributions of this repository that they depend on. Optional
    dependencies (extras) are not included."""
    found: set[str] = set()
    todo = list(distributions)
    while todo:
        found.add(name := todo.pop())
        needed = {name_of(each) for each in pyproject(FOLDERS[name])["project"]["dependencies"]}
        todo += needed & FOLDERS.keys() - found
    return found
