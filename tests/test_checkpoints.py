"""docs/checkpoints.md lists the published drafts that the plugins name, and names tests that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from test_coverage_table import NAMED, missing

from specdec_core import Plugins

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "checkpoints.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_plugins():
    done = subprocess.run(
        [sys.executable, DOCS / "checkpoint_tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_method_with_published_drafts_has_a_table():
    plugins = Plugins.load()
    named = {method for method in plugins.proposers() if plugins.proposer(method).published}
    assert set(re.findall(r"<!-- published: (\w+) -->", TEXT)) - {"end"} == named


@pytest.mark.parametrize(("before", "after"), [("EAGLE3-LLaMA3.1", "EAGLE3-LLaMA3.2"), ("| lmsys/vicuna", "| vicuna")])
def test_a_table_that_differs_is_noticed_and_written_anew(before, after, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(DOCS / "checkpoint_tables.py", docs)
    start, tables = TEXT.split("\n## ", 1)  # the example before is not written from the plugins
    assert before in tables
    changed, command = docs / "checkpoints.md", [sys.executable, docs / "checkpoint_tables.py"]
    changed.write_text(f"{start}\n## {tables.replace(before, after, 1)}", encoding="utf-8")
    done = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "does not have the pairs of the plugins: run python docs/checkpoint_tables.py" in done.stderr
    subprocess.run(command, check=True)
    assert changed.read_text(encoding="utf-8") == TEXT


def test_tests_that_are_named_exist():
    named = NAMED.findall(TEXT)
    assert len(named) > 10
    assert [path + names for path, names in named if missing(path, names)] == []
