"""spec-decode plugins: what is installed, and what is wrong with it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence

import attrs
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_core.cli import COMMANDS
from specdec_core.plugins import PluginInfo, Plugins, PluginWarning


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
@click.option("--disable", multiple=True, metavar="NAME", help="Do not import this plugin (repeatable).")
def command(as_json: bool, disable: tuple[str, ...]) -> None:
    """List the installed plugins.

    One line for each: name, distribution, version, status, what it provides; below them, what is wrong and what to do.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # the listing says the same, and more
        plugins = Plugins.load(disable=disable).listing(COMMANDS)
    if as_json:
        click.echo(json.dumps([attrs.asdict(plugin) for plugin in plugins], indent=2))
    else:
        _print(plugins)


def _print(plugins: Sequence[PluginInfo]) -> None:
    console = Console()
    if not plugins:
        console.print("No plugin is installed. Proposers are packages of their own; install one with pip.")
        return
    table = Table("name", "distribution", "version", "status", "provides")
    for plugin in plugins:
        cells = (plugin.name, plugin.distribution, plugin.version, plugin.status, ", ".join(plugin.provides))
        table.add_row(*(Text(cell) for cell in cells))  # Text: a name with brackets is no markup
    console.print(table)
    for error in dict.fromkeys(plugin.error for plugin in plugins if plugin.error):
        console.print(Text(error), soft_wrap=True)
