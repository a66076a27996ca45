"""Commands that plugins add to `spec-decode`. Only the command line collects them; building an engine does not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import click
from attrs import frozen

from specdec_core.config.fields import shown
from specdec_core.errors import PluginError
from specdec_core.plugins.discovery import Plugin


@frozen
class Fault:
    """A command that cannot be run, with the error to raise instead."""

    name: str  # or the plugin's, if its commands are unknown
    plugins: tuple[Plugin, ...]
    error: PluginError


@frozen
class PluginCommands:
    usable: Mapping[str, click.Command]
    faults: Sequence[Fault]

    @classmethod
    def of(cls, plugins: Iterable[Plugin], core: Collection[str]) -> PluginCommands:
        """Collect the commands of plugins. core: names of core's own commands, which no plugin may take."""
        usable: dict[str, click.Command] = {}
        faults: list[Fault] = []
        claims: dict[str, list[tuple[Plugin, click.Command]]] = {}
        for plugin in plugins:
            try:
                for command in offered(plugin):
                    claims.setdefault(str(command.name), []).append((plugin, command))
            except PluginError as error:
                faults.append(Fault(plugin.name, (plugin,), error))
        for name, claimed in claims.items():
            owners = tuple(plugin for plugin, _ in claimed)
            if name not in core and len(owners) == 1:
                usable[name] = claimed[0][1]
                continue
            labels = [*(["specdec-core"] if name in core else []), *(plugin.label for plugin in owners)]
            refusal = (
                f"the command {name!r} is claimed by {' and by '.join(labels)}: disable one of the plugins, as in "
                f"SPECDEC_DISABLE={owners[-1].name}, or rename its command"
            )
            faults.append(Fault(name, owners, PluginError(refusal)))
        return cls(usable, faults)

    def find(self, name: str) -> click.Command | None:
        """Return the command of that name; None if no plugin offers it. Raises PluginError if it cannot be used."""
        if name not in self.usable:
            for fault in self.faults:
                if fault.name == name:
                    raise fault.error
        return self.usable.get(name)


def offered(plugin: Plugin) -> list[click.Command]:
    """The commands of one plugin. Raises PluginError if its hook fails or returns anything but click commands."""
    with plugin.blamed("offer its commands"):
        commands = [command for part in plugin.loaded_hooks.hook.specdec_commands() for command in part]
        for command in commands:
            if not isinstance(command, click.Command) or not command.name:
                raise TypeError(f"specdec_commands returned {shown(command)}, which is not a click command with a name")
    return commands
