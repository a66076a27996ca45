"""Builds the docs site into build/site from the documents of all packages.

    python docs/site_builder.py

The documents keep their places, so that links between them work in the repository and on the site. Links to files that
are no documents become plain text.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from os.path import normpath
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("proposers", "models", "kv_managers", "integrations", "examples/plugins")
PLACES = (
    *(
        "*.md",
        "docs/*.md",
        "docs/*.svg",
        "[!.]*/README.md",
        "examples/serving/README.md",
        "benchmarks/results/*.png",
        "models/*/*.png",
    ),
    *(f"{folder}/*/README.md" for folder in FOLDERS),
)
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?!https?:|mailto:|#)(?P<path>[^)#\s]+)(?:#[^)]*)?\)")


def documents(root: Path) -> list[Path]:
    """The files of the site, relative to the root of the repository."""
    return sorted({path.relative_to(root) for place in PLACES for path in root.glob(place)})


def without_dead_links(text: str, document: Path, known: set[str]) -> str:
    """Turn links to files that are not on the site into their text."""

    def replace(match: re.Match[str]) -> str:
        is_known = normpath(document.parent / match["path"]) in known
        return match[0] if is_known else match["text"]

    return LINK.sub(replace, text)


def assemble(root: Path, folder: Path) -> None:
    """Copy the documents to an empty folder."""
    found = documents(root)
    known = {str(path) for path in found}
    shutil.rmtree(folder, ignore_errors=True)
    for path in found:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = (root / path).read_text(encoding="utf-8")
            (folder / path).write_text(without_dead_links(text, path, known), encoding="utf-8")
        else:
            shutil.copyfile(root / path, folder / path)


def main() -> None:
    assemble(ROOT, ROOT / "build" / "docs")
    zensical = Path(sys.executable).with_name("zensical")
    sys.exit(subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
