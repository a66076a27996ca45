"""The docs site builds without a warning, its links lead somewhere, and a browser loads nothing from elsewhere."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

sys.path.append(str(Path(__file__).parents[1] / "docs"))

import docstrings
import site_builder

ROOT = Path(__file__).parents[1]
LOADING = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}
"""Tags and attributes with an address that a browser loads by itself."""


class Page(HTMLParser):
    """ids: names of the places in it. links: what can be followed. loaded: what the browser loads itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids, self.links, self.loaded = {""}, list[str](), list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)
            elif (tag, name) in LOADING and value and ("rel", "canonical") not in attrs:
                self.loaded.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    site_builder.assemble(ROOT, folder / "build" / "docs")
    config = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    for name in ("core", "testing"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "docs").symlink_to(ROOT / "docs")
    (folder / "zensical.toml").write_text(config, encoding="utf-8")
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run(
        [zensical, "build", "--strict"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "No issues found\n"), done.stdout + done.stderr
    return folder / "build" / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def broken(pages: dict[Path, Page], site: Path) -> Iterator[str]:
    for path, page in pages.items():
        for link in page.links + page.loaded:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            inside = unquote(address.path)
            to = (site / inside.lstrip("/") if inside.startswith("/") else path.parent / inside) if inside else path
            to = (to / "index.html" if to.is_dir() else to).resolve()
            if not to.exists():
                yield f"{path.relative_to(site)}: {link}: no such file"
            elif to in pages and unquote(address.fragment) not in pages[to].ids:
                yield f"{path.relative_to(site)}: {link}: no such place"


def test_links(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 40
    assert list(broken(pages, site)) == []


def test_a_broken_link_is_found(site: Path, pages: dict[Path, Page]) -> None:
    path = site / "docs" / "tutorial" / "index.html"
    page = Page(path)
    page.links += ["../nowhere/", "../plugins/#nowhere"]
    assert [each.rpartition(": ")[2] for each in broken({**pages, path: page}, site)] == [
        "no such file",
        "no such place",
    ]


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    found = {link for page in pages.values() for link in page.loaded if urlsplit(link).netloc}
    assert found == set()


def entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(each)


def test_navigation_has_every_document() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    known = {str(path) for path in site_builder.documents(ROOT) if path.suffix == ".md"}
    listed = list(entries(nav))
    assert len(listed) == len(set(listed))
    assert set(listed) <= known
    # These are linked where they belong.
    assert known - set(listed) == {
        "core/README.md",
        "examples/serving/README.md",
        "testing/README.md",
        "tools/README.md",
    }


def test_the_reference_has_signatures(pages: dict[Path, Page], site: Path) -> None:
    page = pages[site / "docs" / "reference" / "index.html"]
    names = ["api.llm.LLM.generate", "contracts.proposer.Proposer.propose", "contracts.draft.Draft.from_chains"]
    assert {f"specdec_core.{name}" for name in names} <= page.ids


def test_links_to_other_files_become_text() -> None:
    text = "[a](b.md), [code](../core/x.py), [web](https://example.org), ![image](c.svg) and [part](b.md#d)"
    found = site_builder.without_dead_links(text, Path("docs/page.md"), {"docs/b.md"})
    assert found == text.replace("[code](../core/x.py)", "code")


def test_fields_become_lists() -> None:
    text = "Do it.\n\nname: of it.\nother, more: of\n    both.\nThen go on.\nReturns nothing."
    expected = "Do it.\n\n- `name`: of it.\n- `other, more`: of\n    both.\n\nThen go on.\nReturns nothing."
    assert docstrings.as_lists(text) == expected


def test_pages_have_titles() -> None:
    titles = defaultdict(list)
    for path in site_builder.documents(ROOT):
        if path.suffix == ".md":
            titles[(ROOT / path).read_text(encoding="utf-8").splitlines()[0]].append(path)
    assert all(title.startswith("# ") for title in titles)
