"""Commands that plugins add to the command line."""

from __future__ import annotations

import re
import sys

import pytest
from click.testing import CliRunner, Result

from specdec_core import PluginError, Plugins, PluginWarning, cli

COMMANDS = """
import click
from specdec_core import PluginError, hookimpl

@click.group("{name}")
def group():
    \"\"\"Bread and cakes.\"\"\"

@group.command()
@click.argument("what")
def bake(what):
    if what == "stone":
        raise PluginError("a stone cannot be baked")
    click.echo(f"{name} bakes {{what}}")

@hookimpl
def specdec_commands():
    return [group]
"""
FAILING = "from specdec_core import hookimpl\n@hookimpl\ndef specdec_commands():\n    {}\n"
LIGHT = "import sys; heavy = {'torch', 'transformers', 'numba'} & sys.modules.keys(); assert not heavy, heavy"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


def test_a_plugin_of_commands_alone(site):
    site.plugin("tools", COMMANDS.format(name="bakery"))
    result = run("bakery", "bake", "bread")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "bakery bakes bread\n", "")
    result = run("--help")
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(r"^  bakery +Bread and cakes\.$", result.stdout, re.MULTILINE)
    assert "check " in result.stdout
    assert "bake" in run("bakery", "-h").stdout


def test_a_plugin_of_commands_and_more(site):
    source = COMMANDS.format(name="bakery").replace(
        "@hookimpl", "@hookimpl\ndef specdec_ops(device):\n    return None\n\n@hookimpl"
    )
    site.plugin("tools", source)
    [line] = [line for line in Plugins.load().listing() if line.name == "tools"]
    assert (line.status, line.provides, line.error) == ("ok", ("command bakery", "ops"), None)


def test_its_errors_are_one_line(site):
    site.plugin("tools", COMMANDS.format(name="bakery"))
    result = run("bakery", "bake", "stone")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "error: a stone cannot be baked\n")
    assert run("bakery", "bake").exit_code == 2


def test_core_commands_import_no_plugin_that_they_do_not_need(site):
    site.plugin("tools", COMMANDS.format(name="bakery"))
    assert run("generate", "--help").exit_code == 0
    assert "dist_tools_module" not in sys.modules
    assert run("bakery", "--help").exit_code == 0
    assert "dist_tools_module" in sys.modules


@pytest.mark.parametrize("arguments", [["--help"], ["bakery", "bake", "bread"], ["plugins"]])
def test_nothing_heavy_is_imported(site, arguments):
    site.plugin("tools", COMMANDS.format(name="bakery"))
    code = f"from specdec_core.cli import main\nmain({arguments!r}, standalone_mode=False)"
    result = site.python(f"{code}\n{LIGHT}")
    assert result.returncode == 0, result.stderr
    assert "bak" in result.stdout


def test_engines_do_not_ask_for_commands(site):
    site.plugin("tools", "asked = []\n" + FAILING.format("asked.append(1); return []"))
    plugins = Plugins.load()
    plugins.ops("cpu")
    plugins.verifier("greedy")
    import dist_tools_module

    assert not dist_tools_module.asked
    assert plugins.command("generate") is None
    assert dist_tools_module.asked


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return ['bake']", "specdec_commands returned 'bake', which is not a click command with a name"),
        ("return 5", "TypeError"),
        ("import click; return [click.Command(None)]", "which is not a click command with a name"),
    ],
)
def test_a_hook_that_fails_stops_no_other(site, fault, said):
    site.plugin("oven", FAILING.format(fault))
    site.plugin("tools", COMMANDS.format(name="bakery"))
    named = f"plugin 'oven' (dist-oven 1.0) failed to offer its commands: {said}"
    result = run("bakery", "bake", "bread")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "bakery bakes bread\n", "")
    result = run("--help")
    assert (result.exit_code, "Bread and cakes" in result.stdout) == (0, True)
    assert result.stderr.startswith(f"warning: {named}" if "click" not in said else "warning: plugin 'oven'")
    assert said in result.stderr
    assert "SPECDEC_DISABLE=oven" in result.stderr
    result = run("oven")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: plugin 'oven' (dist-oven 1.0) failed to offer its commands")
    [line] = [line for line in Plugins.load().listing() if line.name == "oven"]
    assert (line.status, line.provides) == ("failed", ("commands",))
    assert said in line.error


def test_its_proposer_is_still_there(site):
    site.proposer("works")
    site.plugin("other", FAILING.format("1 / 0"))
    assert Plugins.load().proposer("works").name == "works"


def test_a_command_with_the_name_of_a_plugin_that_fails(site):
    site.plugin("bakery", FAILING.format("1 / 0"))
    site.plugin("tools", COMMANDS.format(name="bakery"))
    assert run("bakery", "bake", "bread").stdout == "bakery bakes bread\n"


def test_two_plugins_with_one_command(site):
    site.plugin("left", COMMANDS.format(name="bakery"))
    site.plugin("right", COMMANDS.format(name="bakery"))
    site.plugin("tools", COMMANDS.format(name="kitchen"))
    result = run("bakery", "bake", "bread")
    assert (result.exit_code, result.stdout) == (1, "")
    said = "the command 'bakery' is claimed by 'left' (dist-left 1.0) and by 'right' (dist-right 1.0): disable one"
    assert result.stderr.startswith(f"error: {said}")
    assert run("kitchen", "bake", "bread").stdout == "kitchen bakes bread\n"
    result = run("--help")
    assert result.stderr.startswith(f"warning: {said}")
    assert "kitchen" in result.stdout
    assert "bakery" not in result.stdout
    lines = {line.name: line for line in Plugins.load().listing()}
    assert [lines[name].status for name in ("left", "right", "tools")] == ["failed", "failed", "ok"]
    assert lines["left"].error == lines["right"].error
    assert lines["left"].error.startswith(said)


def test_disabling_one_of_the_two_settles_it(site, monkeypatch):
    site.plugin("left", COMMANDS.format(name="bakery"))
    site.plugin("bakery", COMMANDS.format(name="bakery"))
    monkeypatch.setenv("SPECDEC_DISABLE", "bakery")
    assert run("bakery", "bake", "bread").stdout == "bakery bakes bread\n"


def test_one_name_twice_in_one_plugin(site):
    source = COMMANDS.format(name="bakery").replace("return [group]", "return [group, group]")
    site.plugin("tools", source)
    assert "claimed by 'tools' (dist-tools 1.0) and by 'tools' (dist-tools 1.0)" in run("bakery").stderr


def test_the_name_of_a_command_of_core(site):
    site.plugin("tools", COMMANDS.format(name="check"))
    said = "the command 'check' is claimed by specdec-core and by 'tools' (dist-tools 1.0)"
    assert "Bread" not in run("check", "--help").stdout
    assert run("--help").stderr.startswith(f"warning: {said}")
    result = run("plugins", "--json")
    assert said in result.stdout


def test_a_disabled_plugin_says_what_disabled_it(site, monkeypatch):
    site.plugin("bakery", COMMANDS.format(name="bakery"))
    monkeypatch.setenv("SPECDEC_DISABLE", "dist-bakery")
    result = run("bakery", "bake", "bread")
    assert result.exit_code == 1
    assert "is disabled by the environment variable SPECDEC_DISABLE" in result.stderr
    assert "bakery" not in run("--help").stdout
    assert "dist_bakery_module" not in sys.modules


@pytest.mark.filterwarnings("always")
def test_a_plugin_that_cannot_be_imported(site):
    site.plugin("broken", "import no_such_module")
    site.plugin("tools", COMMANDS.format(name="bakery"))
    result = run("--help")
    assert (result.exit_code, "bakery" in result.stdout) == (0, True)
    assert result.stderr.startswith("warning: plugin 'broken' (dist-broken 1.0) cannot be loaded")
    result = run("broken")
    assert result.exit_code == 1
    assert "error: plugin 'broken' (dist-broken 1.0) cannot be loaded" in result.stderr
    assert run("bakery", "bake", "bread").stderr.count("cannot be loaded") == 1
    with pytest.warns(PluginWarning):
        plugins = Plugins.load()
    with pytest.raises(PluginError) as caught:
        plugins.command("broken")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_an_unknown_command(site):
    site.plugin("tools", COMMANDS.format(name="bakery"))
    result = run("bakrey")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "No such command 'bakrey'. Did you mean 'bakery'?" in result.stderr
    assert "The commands are check, generate, plugins, warmup, bakery" in " ".join(result.stderr.split())
    assert "Did you mean" not in run("zzzzz").stderr
    assert "No such option" in run("--bakery").stderr


def test_plugins_are_not_remembered(site):
    assert run("bakery").exit_code == 2
    site.plugin("tools", COMMANDS.format(name="bakery"))
    assert run("bakery", "bake", "bread").exit_code == 0
