"""docs/coverage.md counts its rows rightly, and names tests, documents and files that exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
STATES = ("works", "partly", "missing", "refused")
NAMED = re.compile(r"`([\w/.]+\.(?:py|md))((?:::\w+)*)`")


def rows(text: str) -> list[list[str]]:
    """Return the cells of each table row with three columns, headings left out."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in cells if len(row) == 3 and row[1] in STATES]


def missing(path: str, names: str) -> bool:
    """Whether a file lacks a test or class: `names` is empty or "::TestChains::test_close". A method may be inherited
    from the conformance tests."""
    file = ROOT / path
    texts = [file, *(ROOT / "testing" / "specdec_testing" / "conformance").glob("*.py")]
    if not file.exists():
        return True
    found = "".join(each.read_text(encoding="utf-8") for each in (texts if names.count("::") > 1 else texts[:1]))
    return any(not re.search(rf"(?:def|class) {name}\b", found) for name in names.split("::")[1:])


def test_counts():
    head, *sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    counted = []
    for section in sections:
        states = Counter(state for _, state, _ in rows(section))
        counted.append([sum(states.values()), *(states[state] for state in STATES)])
    counted.append([sum(column) for column in zip(*counted, strict=True)])
    said = re.findall(r"^\| .* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", head, flags=re.MULTILINE)
    assert [[*map(int, row)] for row in said] == counted


def test_what_works_says_where():
    assert [row for row in rows(TEXT) if row[1] == "works" and not NAMED.search(row[2])] == []


def test_what_does_not_work_has_one_of_few_reasons():
    reasons = re.findall(r"^- (R\d+): ", TEXT, flags=re.MULTILINE)
    assert reasons == [f"R{number}" for number in range(1, len(reasons) + 1)]
    assert len(reasons) <= 15
    assert {text.partition(": ")[0] for _, state, text in rows(TEXT) if state != "works"} == set(reasons)


def test_what_is_named_exists():
    named = NAMED.findall(TEXT)
    assert len(named) > 300
    assert [path + names for path, names in named if missing(path, names)] == []
    assert re.findall(r"(?<!\w)::\w+|\.md\.`", TEXT) == [], "not found by NAMED"


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("tests/test_nothing.py", ""),
        ("tests/test_docs.py", "::test_nothing"),
        ("tests/test_docs.py", "::TestA::test_b"),
    ],
)
def test_what_does_not_exist_is_noticed(path, names):
    assert missing(path, names)
