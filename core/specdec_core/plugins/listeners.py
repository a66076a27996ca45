"""Who hears of a step that is over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specdec_core.errors import PluginError
from specdec_core.plugins.discovery import Plugin

if TYPE_CHECKING:
    from specdec_core.contracts.report import StepReport


class StepListeners:
    """The plugins that implement `specdec_step_finished`. False if there are none."""

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        hooks = [(plugin, plugin.loaded_hooks.hook.specdec_step_finished) for plugin in plugins]
        self._listeners = [(plugin, hook) for plugin, hook in hooks if hook.get_hookimpls()]

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def tell(self, report: StepReport) -> None:
        """Raises PluginError that names the first one that fails."""
        for plugin, hook in self._listeners:
            try:
                hook(report=report)
            except (Exception, SystemExit) as error:
                raise PluginError(
                    f"plugin {plugin.label} failed to hear about a step: {type(error).__name__}: {error}. Repair it, "
                    f"or disable it with SPECDEC_DISABLE={plugin.name}"
                ) from error
