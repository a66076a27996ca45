"""spec-decode plugins, and what importing core costs."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import specdec_core
from specdec_core import PluginError, cli

LIGHT = "import sys; heavy = {'torch', 'transformers', 'numba'} & sys.modules.keys(); assert not heavy, heavy"


@pytest.mark.parametrize(
    "code",
    [
        "import specdec_core; dir(specdec_core)",
        "import specdec_core.hookspecs, specdec_core.plugins, specdec_core.types",
        "from specdec_core import Draft, Plugins, ProposerSpec, hookimpl",
        "from specdec_core import Plugins; assert 'light' in {p.name for p in Plugins.load().listing()}",
    ],
)
def test_importing_and_listing_import_nothing_heavy(site, code):
    site.proposer("light")
    result = site.python(f"{code}\n{LIGHT}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("arguments", [["plugins"], ["plugins", "--json"], ["--help"], ["plugins", "--help"]])
def test_command_imports_nothing_heavy(site, arguments):
    site.proposer("light")
    run = f"from specdec_core.cli import main\nmain({arguments!r}, standalone_mode=False)"
    result = site.python(f"{run}\n{LIGHT}")
    assert result.returncode == 0, result.stderr


def test_json(site):
    site.proposer("works")
    site.plugin("broken", "import no_such_module")
    result = CliRunner().invoke(cli.main, ["plugins", "--json", "--disable", "works"])
    assert (result.exit_code, result.stderr) == (0, "")
    lines = {line["name"]: line for line in json.loads(result.stdout)}
    assert lines["works"]["status"] == "disabled"
    assert lines["broken"] == {
        "name": "broken",
        "distribution": "dist-broken",
        "version": "1.0",
        "status": "failed",
        "provides": [],
        "error": lines["broken"]["error"],
    }
    assert "no_such_module" in lines["broken"]["error"]


def test_table(site):
    site.proposer("works[0]", distribution="dist-works")
    site.plugin("broken", "import no_such_module")
    result = CliRunner().invoke(cli.main, ["plugins"], env={"COLUMNS": "200"})
    assert (result.exit_code, result.stderr) == (0, "")
    assert "works[0]" in result.stdout
    assert "proposer works[0]" in result.stdout
    assert result.stdout.count("No module named 'no_such_module'") == 1


@pytest.mark.filterwarnings("default")
def test_name_that_is_not_installed(site):
    result = CliRunner().invoke(cli.main, ["plugins", "--disable", "nobody"])
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ")
    assert "'nobody', which is not installed" in result.stderr


def test_errors_are_one_line(monkeypatch):
    @click.command()
    def failing() -> None:
        raise PluginError("unknown proposer 'x'")

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: failing)
    result = CliRunner().invoke(cli.main, ["anything"])
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "error: unknown proposer 'x'\n")


def test_unknown_command():
    result = CliRunner().invoke(cli.main, ["plugin"])
    assert result.exit_code == 2
    assert "No such command 'plugin'" in result.stderr


def test_every_public_name_exists():
    for name in specdec_core.__all__:
        assert getattr(specdec_core, name) is not None
    assert set(specdec_core.__all__) <= set(dir(specdec_core))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        getattr(specdec_core, "nonsense")  # noqa: B009


def test_type_checkers_see_the_same_public_names():
    tree = ast.parse(Path(specdec_core.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (alias.asname, importlib.import_module(node.module))
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {(name, importlib.import_module(home)) for name, home in specdec_core._MODULES.items()}
