"""The plugins of one engine, command or test: loaded once, looked up by name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from specdec_core.contracts.grammar import GrammarSpec
from specdec_core.contracts.kv import KVManagerSpec
from specdec_core.contracts.proposer import ProposerSpec
from specdec_core.contracts.verifier import VerifierSpec
from specdec_core.errors import PluginError
from specdec_core.plugins import discovery, loading
from specdec_core.plugins.discovery import Plugin
from specdec_core.plugins.listing import PluginInfo, listing
from specdec_core.plugins.offers import Offers
from specdec_core.plugins.operations import OfferedOps

if TYPE_CHECKING:
    import click

    from specdec_core.contracts.report import StepReport
    from specdec_core.plugins.commands import PluginCommands

BUILTINS = ("specdec_core.plugins.builtin",)
"""Modules of core that offer its own parts through the same hooks as any plugin, and are imported like one."""


class PluginWarning(UserWarning):
    """A plugin could not be loaded, or it failed where no caller could catch an exception, as at garbage collection."""


class Plugins:
    """The plugins that one engine, command or test uses. `Plugins.load()` makes one; there is no global state."""

    def __init__(self, plugins: Sequence[Plugin], models: Sequence[Plugin] = ()) -> None:
        self._plugins = plugins
        self.models = models  # embedded ones: `specdec_core.models.embedded` resolves their names
        self._offers = Offers(plugins)
        hooks = [(plugin, plugin.loaded_hooks.hook.specdec_step_finished) for plugin in self._offers.modules]
        self._listeners = [(plugin, hook) for plugin, hook in hooks if hook.get_hookimpls()]

    @classmethod
    def load(
        cls, disable: str | Iterable[str] = (), *, modules: Sequence[str] = (), builtins: Sequence[str] = BUILTINS
    ) -> Self:
        """Import every plugin that is installed and not disabled.

        disable: names of plugins or distributions, besides those in the environment variable SPECDEC_DISABLE. A name
            that is not installed causes a UserWarning.
        modules: names of further modules to load as plugins, without entry points.
        builtins: modules to load as core's own.

        A plugin that cannot be loaded causes one PluginWarning now, and a PluginError when it is asked for.
        """
        plugins, models = discovery.find(builtins, modules), discovery.find_models()
        for origin, names in {
            discovery.VARIABLE: os.environ.get("SPECDEC_DISABLE", ""),
            "the argument disable (--disable)": disable,
        }.items():
            for name in discovery.refuse_disabled([*plugins, *models], discovery.names_in(names), origin):
                warnings.warn(f"{origin} names {name!r}, which is not installed", stacklevel=2)
        discovery.refuse_duplicates(plugins)
        discovery.refuse_duplicates(models)
        refused = [str(model.error) for model in models if model.status == "failed"]
        for error in (*loading.load_all(plugins), *refused):
            warnings.warn(f"{error}. The other plugins are loaded", PluginWarning, stacklevel=2)
        return cls(plugins, models)

    @property
    def usable(self) -> list[Plugin]:
        """The plugins that were loaded, with core's own."""
        return [plugin for plugin in self._plugins if plugin.status == "ok"]

    def proposer(self, name: str) -> ProposerSpec:
        """The proposer of that name. Raises PluginError, with the reason and advice, if it is not available."""
        return self._offers.find(ProposerSpec, name)

    def proposers(self) -> list[str]:
        """The names of all loaded proposers, sorted, even if modules that they require are not installed."""
        return self._offers.names(ProposerSpec)

    def verifier(self, name: str) -> VerifierSpec:
        """The verifier of that name. Raises PluginError, with the reason and advice, if it is not available."""
        return self._offers.find(VerifierSpec, name)

    def kv_manager(self, name: str) -> KVManagerSpec:
        """The KV manager of that name. Raises PluginError, with the reason and advice, if it is not available."""
        return self._offers.find(KVManagerSpec, name)

    def grammar(self) -> GrammarSpec:
        """The compiler of grammars. Raises ConfigError, with advice, unless there is exactly one."""
        return self._offers.only(GrammarSpec)

    def detect(self, config: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]) -> ProposerSpec:
        """Return the one proposer that recognizes a draft checkpoint by its configuration and the shape of each tensor.
        Raises PluginError unless exactly one does."""
        return self.proposer(self._offers.detect(config, tensor_shapes))

    def recognize(self, config: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """What a draft checkpoint is, such as "an EAGLE head", by the name of each proposer that recognizes it."""
        return self._offers.recognize(config, tensor_shapes)

    def ops(self, device: str) -> OfferedOps:
        """The operations that plugins offer for this type of device ("cpu", "cuda"), for `specdec_core.ops.resolve`.
        Raises PluginError if a plugin fails, returns anything but an OpsSpec or is written for another plugin API."""
        return OfferedOps.of(self._offers.modules, device)

    @property
    def step_finished(self) -> Callable[[StepReport], None] | None:
        """A function that calls all plugins' `specdec_step_finished` with a StepReport; None if no plugin has one."""
        return self._tell if self._listeners else None

    def _tell(self, report: StepReport) -> None:
        for plugin, hook in self._listeners:
            with plugin.blamed("hear about a step"):
                hook(report=report)

    def commands(self, core: Collection[str] = ()) -> PluginCommands:
        """The commands of plugins. core: names of core's own commands, which no plugin may take."""
        from specdec_core.plugins.commands import PluginCommands

        return PluginCommands.of(self._offers.modules, core)

    def command(self, name: str, core: Collection[str] = ()) -> click.Command | None:
        """Return the command of that name; None if no plugin offers it. Raises PluginError if a plugin of that name, or
        one that offers the command, is not usable."""
        found = self.commands(core).find(name)
        if found is None:
            for plugin in self._plugins:
                if plugin.error and plugin.name == name:
                    raise PluginError(plugin.error) from plugin.cause
        return found

    def listing(self, core_commands: Collection[str] = ()) -> list[PluginInfo]:
        """A PluginInfo for each plugin and embedded model, usable or not. core_commands: names of core's commands."""
        return listing([*self._plugins, *self.models], self.commands(core_commands))
