"""Write the tables of published targets and drafts into docs/checkpoints.md.

    python docs/checkpoint_tables.py            # rewrite the document
    python docs/checkpoint_tables.py --check    # exit 1 if a table differs from the plugins

A table lies between `<!-- published: METHOD -->` and `<!-- published: end -->`. It has the pairs that the method's
plugin names (`ProposerSpec.published`), each with the speculative_config that runs it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from specdec_core import Plugins

DOCUMENT = Path(__file__).parent / "checkpoints.md"
END = "<!-- published: end -->"
REGION = re.compile(r"<!-- published: (?P<method>(?!end\b)\w+) -->\n.*?" + re.escape(END), re.DOTALL)


def table(method: str, published: Mapping[str, str]) -> str:
    """published: {name of a target on the hub: name of its draft}."""
    lines = ["| target | draft | `speculative_config` |", "|---|---|---|"]
    for target, draft in published.items():
        config = json.dumps({"method": method, "model": draft})
        lines.append(f"| {target} | {draft} | `{config}` |")
    return "\n".join(lines)


def written(text: str, plugins: Plugins) -> str:
    """Return the document's text with its tables updated."""

    def region(match: re.Match[str]) -> str:
        method = match["method"]
        return f"<!-- published: {method} -->\n\n{table(method, plugins.proposer(method).published)}\n\n{END}"

    return REGION.sub(region, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, before = parser.parse_args().check, DOCUMENT.read_text(encoding="utf-8")
    after = written(before, Plugins.load())
    if check and after != before:
        sys.exit(f"docs/{DOCUMENT.name} does not have the pairs of the plugins: run python docs/checkpoint_tables.py")
    DOCUMENT.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
