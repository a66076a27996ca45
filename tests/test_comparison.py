"""docs/comparison.md has a source for what its tables say of other engines; links lead to documents that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TABLES, SOURCES = (DOCS / "comparison.md").read_text(encoding="utf-8").split("\n## Sources\n")
MARK = re.compile(r"\b[A-Z]\d{1,2}\b")
DEFINED = re.findall(r"^- ([A-Z]\d{1,2}): ", SOURCES, flags=re.MULTILINE)
LINK = re.compile(r"\]\((?!https:)([^)#]*)(?:#([^)]*))?\)")
ENGINES = 6


def rows(text: str) -> list[list[str]]:
    """Return the cells of other engines in each row of the feature tables, headings left out."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row[2:] for row in cells if len(row) == 2 + ENGINES and row[0] and not row[0].startswith("-")]


def without_source(text: str) -> list[str]:
    """Return the cells that say something of an engine without a mark or a link. What Arctic Inference has of vLLM has
    vLLM's source."""
    cells = {cell for row in rows(text) for cell in row} - {"unknown", "-", "vLLM's"}
    return sorted(cell for cell in cells if not MARK.search(LINK.sub(" A1 ", cell)))


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_cell_has_a_source():
    assert len(rows(TABLES)) > 30
    assert without_source(TABLES) == []


@pytest.mark.parametrize(("before", "after"), [("yes, a trie (S1)", "yes, a trie"), ("| vLLM's |", "| as vLLM |")])
def test_a_cell_without_a_source_is_noticed(before, after):
    assert before in TABLES
    assert without_source(TABLES.replace(before, after, 1)) == [after.strip("| ")]


def test_marks_are_defined_once_and_used():
    assert len(DEFINED) == len(set(DEFINED)) > 40
    letters = {mark[0] for mark in DEFINED}
    assert {mark for mark in MARK.findall(TABLES) if mark[0] in letters} == set(DEFINED)


@pytest.mark.parametrize("name", ["comparison.md", "checkpoints.md"])
def test_links_lead_somewhere(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    links = LINK.findall(text)
    assert len(links) > 3
    for path, anchor in links:
        file = DOCS / path if path else DOCS / name
        assert file.exists(), path
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), f"{path}#{anchor}"
