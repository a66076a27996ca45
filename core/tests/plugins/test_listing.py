"""The command `spec-decode plugins`. This command and `import specdec_core` import no heavy packages such as torch."""

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
        "import specdec_core.contracts.hooks, specdec_core.plugins, specdec_core.contracts.draft",
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
        "options": {},
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


@pytest.mark.parametrize("columns", ["80", "40"])
def test_no_cell_of_the_table_is_cut(site, columns):
    for name in ("some_long_name", "another_name_that_is_long"):
        site.proposer(name, distribution=f"specdec-proposer-{name.replace('_', '-')}")
    result = CliRunner().invoke(cli.main, ["plugins"], env={"COLUMNS": columns})
    assert "\u2026" not in result.stdout
    for name in ("some-long-name", "another-name-that-is-long"):
        assert f" specdec-proposer-{name} " in result.stdout


def test_no_line_breaks_without_a_terminal(site):
    name = "a_name_" + 10 * "that_is_long_"
    site.proposer(name, distribution="dist-long")
    lines = CliRunner().invoke(cli.main, ["plugins"]).stdout.splitlines()
    (line,) = (line for line in lines if "dist-long" in line)
    assert line.split() == [name, "dist-long", "1.0", "ok", "proposer", name]


BENT = "1.0\x1b[31m\x9b31m\u202e"  # what a terminal would obey
STRAIGHT = r"1.0\x1b[31m\x9b31m\u202e"


@pytest.mark.filterwarnings("default::specdec_core.plugins.PluginWarning")
def test_a_version_cannot_steer_the_terminal(site):
    site.plugin("broken", "import no_such_module", version=BENT)
    command, env = CliRunner(), {"COLUMNS": "200"}
    table = command.invoke(cli.main, ["plugins"], env=env)
    assert table.stdout.count(STRAIGHT) == 2  # in its line, and in what is wrong
    warning = command.invoke(cli.main, ["--help"])
    assert f"warning: plugin 'broken' (dist-broken {STRAIGHT}) cannot be loaded" in warning.stderr
    error = command.invoke(cli.main, ["generate", "--method", "broken", "x"])
    assert f"error: plugin 'broken' (dist-broken {STRAIGHT}) cannot be loaded" in error.stderr
    for result in (table, warning, error):
        assert all(each.isprintable() or each == "\n" for each in result.output)


WITH_OPTIONS = """
from attrs import field, frozen, validators
from specdec_core import ProposerSpec, VerifierSpec, hookimpl, whole_number

@frozen
class Config:
    {name}_depth: int = field(default=8, validator=whole_number(1, 64), metadata={{"help": "Levels of the [tree]."}})
    {name}_width: int = field(default=2, validator=validators.ge(1))

@frozen
class Strictness:
    strictness: float

@hookimpl
def specdec_proposers():
    return [ProposerSpec(name="{name}", config=Config, build=print, api=1)]

@hookimpl
def specdec_verifiers():
    return [VerifierSpec(name="{name}", build=print, api=1, config={verifier_config})]
"""


def test_options_of_third_parties(site):
    site.plugin("theirs", WITH_OPTIONS.format(name="theirs", verifier_config="Strictness"))
    result = CliRunner().invoke(cli.main, ["plugins", "theirs", "--json"])
    [found] = json.loads(result.stdout)
    assert found["options"] == {
        "proposer theirs": [
            {
                "name": "theirs_depth",
                "allowed": "an integer from 1 to 64",
                "default": "8",
                "help": "Levels of the [tree].",
            },
            {"name": "theirs_width", "allowed": "int", "default": "2", "help": ""},
        ],
        "verifier theirs": [{"name": "strictness", "allowed": "float", "default": None, "help": ""}],
    }
    result = CliRunner().invoke(cli.main, ["plugins", "theirs"], terminal_width=100)
    assert (result.exit_code, result.stderr) == (0, "")
    table, options = result.stdout.split("Options of proposer theirs:\n")
    assert "dist-theirs" in table
    assert "builtin" not in table
    assert options == (
        "  theirs_depth  Levels of the [tree].  [an integer from 1 to 64; default: 8]\n"
        "  theirs_width  [int; default: 2]\n"
        "\nOptions of verifier theirs:\n"
        "  strictness  [float; required]\n"
    )


def test_one_of_several_that_a_plugin_provides():
    result = CliRunner().invoke(cli.main, ["plugins", "typical"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Options of verifier typical:\n  posterior_threshold" in result.stdout
    result = CliRunner().invoke(cli.main, ["plugins", "greedy"])
    assert "It has no options." in result.stdout
    assert "posterior_threshold" not in result.stdout


def test_a_name_that_nothing_has(site):
    site.proposer("works")
    result = CliRunner().invoke(cli.main, ["plugins", "wroks"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: no plugin is called 'wroks', or provides it. Did you mean 'works'?")
    assert "no plugin is called ''" in CliRunner().invoke(cli.main, ["plugins", ""]).stderr


def test_the_config_of_a_verifier_is_an_attrs_class(site):
    site.plugin("theirs", WITH_OPTIONS.format(name="theirs", verifier_config="dict"))
    [found] = json.loads(CliRunner().invoke(cli.main, ["plugins", "theirs", "--json"]).stdout)
    assert found["status"] == "failed"
    assert "the config of the verifier 'theirs' is <class 'dict'>, not an attrs class" in found["error"]


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


def test_public_names_are_where_the_stub_says():
    tree = ast.parse(Path(specdec_core.__file__).with_suffix(".pyi").read_text())
    aliases = [(node.module, alias) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    for module, alias in aliases:
        assert alias.asname == alias.name, "a type checker takes only such names for exported"
        assert getattr(specdec_core, alias.name) is getattr(importlib.import_module(module), alias.name)
    assert {"LLM", "Draft", "Proposer"} < {alias.name for _, alias in aliases}
