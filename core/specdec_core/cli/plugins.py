"""spec-decode plugins: lists installed plugins, their errors and their options."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence

import attrs
import click
from rich.measure import Measurement
from rich.table import Table

from specdec_core.cli import COMMANDS
from specdec_core.cli.options import write_options
from specdec_core.cli.screen import WIDE, cell, make_console
from specdec_core.errors import PluginError, did_you_mean
from specdec_core.plugins import PluginInfo, Plugins, PluginWarning


@click.command()
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead, with the options of each plugin.")
@click.option("--disable", multiple=True, metavar="NAME", help="Do not import this plugin (repeatable).")
@click.pass_context
def command(ctx: click.Context, name: str | None, as_json: bool, disable: tuple[str, ...]) -> None:
    """List the installed plugins, or show one with its options.

    Prints one line for each plugin: name, distribution, version, status, what it provides. Errors follow, with advice.

    NAME is the name of a plugin, or of anything that a plugin provides, such as a method or a verifier. With a NAME,
    only its plugin and its options are shown.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # the listing has the same messages, with advice
        plugins = Plugins.load(disable=disable).listing(COMMANDS)
    if name is not None:
        plugins = _named(plugins, name)
    if as_json:
        click.echo(json.dumps([attrs.asdict(plugin) for plugin in plugins], indent=2))
        return
    _print(plugins)
    if name is not None:
        _print_options(ctx, plugins)


def _named(plugins: Sequence[PluginInfo], name: str) -> list[PluginInfo]:
    """Select the plugins that have this name, or that provide something of this name, such as a method or a verifier.
    A plugin found by what it provides keeps only the options of that method or verifier. Raises PluginError if no
    plugin is found."""
    found, known = [], set()
    for plugin in plugins:
        offers = {offer: offer.partition(" ")[2] or offer for offer in plugin.provides}  # "ops" has no name
        known |= {plugin.name, *offers.values()}
        if plugin.name == name:
            found.append(plugin)
        elif name in offers.values():
            options = {offer: options for offer, options in plugin.options.items() if offers[offer] == name}
            found.append(attrs.evolve(plugin, options=options))
    if not found:
        hint = did_you_mean(name, known)
        raise PluginError(f"no plugin is called {name!r}, or provides it.{hint} `spec-decode plugins` lists them all")
    return found


def _print(plugins: Sequence[PluginInfo]) -> None:
    console = make_console()
    if not plugins:
        console.print("No plugin is installed. Proposers are packages of their own; install one with pip.")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("name", "distribution", "version", "status"):
        table.add_column(title, no_wrap=True)
    table.add_column("provides")
    for plugin in plugins:
        cells = (plugin.name, plugin.distribution, plugin.version, plugin.status, ", ".join(plugin.provides))
        table.add_row(*map(cell, cells))
    # Names are typed into other commands: where the terminal is too narrow for them, it breaks lines, and none is cut.
    console.width = max(console.width, Measurement.get(console, console.options.update(width=WIDE), table).minimum)
    console.print(table)
    for error in dict.fromkeys(plugin.error for plugin in plugins if plugin.error):
        console.print(cell(error), soft_wrap=True)


def _print_options(ctx: click.Context, plugins: Sequence[PluginInfo]) -> None:
    formatter = ctx.make_formatter()
    for offer, options in (item for plugin in plugins for item in plugin.options.items()):
        write_options(formatter, f"Options of {offer}", options)
    click.echo(formatter.getvalue() or "It has no options.\n", nl=False)
