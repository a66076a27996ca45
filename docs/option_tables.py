"""Write the tables of options into the Markdown documents that show them.

    python docs/option_tables.py            # rewrite the documents
    python docs/option_tables.py --check    # exit 1 if a table differs from the config classes

A table lies between two comments: `<!-- options: X -->` and `<!-- options: end -->`. X is one of

- the name of a config class that `specdec_core` has, such as EngineConfig;
- the kind and name of something that a plugin provides, such as `proposer ngram`;
- either of these followed by `, its own`: the table leaves out inherited options.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import specdec_core
from specdec_core import Plugins
from specdec_core.config.options import Option, options_of, own_names

ROOT = Path(__file__).parents[1]
PLACES = ("docs/*.md", "README.md", "[!.]*/README.md", "[!.]*/[!.]*/README.md")
DOCUMENTS = sorted(path for place in PLACES for path in ROOT.glob(place))
NAME, BAR = re.compile(r"\b[a-z0-9]+_[\w.]*\w"), r"\|"
BEGIN, END = "<!-- options: {} -->", "<!-- options: end -->"
REGION = re.compile(r"<!-- options: (?P<what>(?!end\b)[^>]*?) -->\n.*?" + re.escape(END), re.DOTALL)


def config_class(what: str, plugins: Plugins) -> type:
    """Return the config class that the comment `<!-- options: X -->` names.

    what: the text X of that comment, without `, its own`.
    """
    kind, _, name = what.partition(" ")
    found: type = getattr(plugins, kind)(name).config if name else getattr(specdec_core, what)
    return found


def options_in(what: str, plugins: Plugins) -> list[Option]:
    """Return the options to show in the table below the comment `<!-- options: X -->`.

    what: the text X of that comment.
    """
    name, comma, _ = what.partition(", its own")
    config = config_class(name, plugins)
    return [option for option in options_of(config) if not comma or option.name in own_names(config)]


def table(options: list[Option]) -> str:
    lines = ["| option | default | allowed | what it does |", "|---|---|---|---|"]
    for option in options:
        default = "" if option.default is None else f"`{option.default}`"
        text = NAME.sub(r"`\g<0>`", option.help)
        cells = (f"`{option.name}`", default, option.allowed, text)
        lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return "\n".join(lines)


def written(text: str, plugins: Plugins) -> str:
    """Return the text of a document with its option tables updated.

    text: the document's text.
    Raises ValueError if a table has no end comment.
    """
    if text.count(BEGIN.partition("{")[0]) != 2 * len(REGION.findall(text)):
        raise ValueError(f"a table of options does not end: write {END!r} below each")

    def region(match: re.Match[str]) -> str:
        what = match["what"]
        return f"{BEGIN.format(what)}\n\n{table(options_in(what, plugins))}\n\n{END}"

    return REGION.sub(region, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, plugins = parser.parse_args().check, Plugins.load()
    for path in DOCUMENTS:
        before = path.read_text(encoding="utf-8")
        after = written(before, plugins)
        if check and after != before:
            sys.exit(f"{path.relative_to(ROOT)} does not say what the fields say: run python docs/option_tables.py")
        path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
