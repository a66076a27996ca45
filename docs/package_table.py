"""Write down which package of this repository provides what, so that errors can name the package to install.

    python docs/package_table.py            # rewrite the file
    python docs/package_table.py --check    # exit 1 if the file differs from the packages

The file is `plugins/packages.json` in specdec_core. It has the proposers, with their aliases, the verifiers and the KV
managers of all packages that are installed from this repository, but for core's own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path

from specdec_core import Plugins
from specdec_core.plugins.loading import KINDS
from specdec_core.plugins.offers import PACKAGES

ROOT = Path(__file__).parents[1]
PROJECTS = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in ROOT.glob("[!.]*/**/pyproject.toml")]
OURS = {project["name"] for project in PROJECTS if "specdec" in project.get("entry-points", {})}


def packages(plugins: Plugins) -> dict[str, str]:
    """Return {kind and name, such as "proposer ngram": the distribution's name}."""
    infos = [info for info in plugins.listing() if info.distribution in OURS]
    offers = [(what, info.distribution) for info in infos for what in info.provides]
    found = {what: distribution for what, distribution in offers if what.partition(" ")[0] in KINDS.values()}
    for what, distribution in tuple(found.items()):
        if what.startswith("proposer "):
            names = plugins.proposer(what.partition(" ")[2]).aliases
            found |= {f"proposer {name}": distribution for name in names}
    return dict(sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, text = parser.parse_args().check, json.dumps(packages(Plugins.load()), indent=2) + "\n"
    if check and PACKAGES.read_text(encoding="utf-8") != text:
        sys.exit(f"{PACKAGES.name} does not have what the packages provide: run python docs/package_table.py")
    PACKAGES.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
