"""The file from which errors name the package to install has what the packages of this repository provide."""

from __future__ import annotations

import json
import subprocess
import sys

from projects import FOLDERS, ROOT, pyproject

from specdec_core.plugins.offers import PACKAGES

COMMAND = [sys.executable, ROOT / "docs" / "package_table.py"]


def test_the_file_has_what_the_packages_provide():
    done = subprocess.run([*COMMAND, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    given = json.loads(PACKAGES.read_text(encoding="utf-8"))
    assert set(given.values()) <= FOLDERS.keys()
    for name, folder in FOLDERS.items():
        entries = pyproject(folder)["project"].get("entry-points", {}).get("specdec", {})
        if name.startswith("specdec-proposer-"):
            assert {what.partition(" ")[2] for what, package in given.items() if package == name} >= entries.keys()


def test_a_package_that_is_missing_in_it_is_noticed(tmp_path):
    before = PACKAGES.read_text(encoding="utf-8")
    code = f"""if True:
        import runpy, sys
        from pathlib import Path
        from specdec_core.plugins import offers
        offers.PACKAGES = Path({str(tmp_path / "packages.json")!r})
        sys.argv = ["package_table.py", "--check"]
        runpy.run_path({str(COMMAND[1])!r}, run_name="__main__")
    """
    (tmp_path / "packages.json").write_text(before.replace('"proposer medusa"', '"proposer meduse"'), encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "packages.json does not have what the packages provide: run python docs/package_table.py" in done.stderr
    assert PACKAGES.read_text(encoding="utf-8") == before
