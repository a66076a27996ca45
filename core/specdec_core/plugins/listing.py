"""Lists installed plugins and their errors, for `spec-decode plugins`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen

from specdec_core.config.options import Option
from specdec_core.plugins.discovery import Plugin, Status
from specdec_core.plugins.loading import options, provides
from specdec_core.plugins.offers import missing_modules

if TYPE_CHECKING:
    from specdec_core.plugins.commands import PluginCommands


@frozen
class PluginInfo:
    """One plugin or embedded model in the output of `spec-decode plugins`."""

    name: str
    distribution: str
    version: str
    status: Status
    provides: tuple[str, ...]  # "proposer ngram", "verifier greedy", "kv_manager paged", "model tiny", "ops" ...
    error: str | None  # why the status is not "ok", and what to do
    options: Mapping[str, tuple[Option, ...]] = field(factory=dict)  # {"proposer ngram": keys of its config class ...}


def listing(plugins: Sequence[Plugin], commands: PluginCommands) -> list[PluginInfo]:
    """Return a PluginInfo for each plugin, including unusable ones, with errors of its commands."""
    lines = []
    faults = {plugin.value: str(fault.error) for fault in commands.faults for plugin in fault.plugins}
    for plugin in plugins:
        problem = None
        if plugin.status == "ok":
            problems = [*(missing_modules(plugin, spec) for spec in plugin.specs), faults.get(plugin.value)]
            problem = next(filter(None, problems), None)
        status: Status = "failed" if problem else plugin.status
        what = (plugin.name, plugin.distribution, plugin.version, status, provides(plugin))
        lines.append(PluginInfo(*what, error=problem or plugin.error, options=options(plugin)))
    return lines
