"""Operations that plugins offer to replace those in `specdec_core.ops`, and which of them is used for given layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import frozen

from specdec_core.config.fields import shown
from specdec_core.contracts.ops import OpsContext, OpsSpec
from specdec_core.contracts.proposer import PLUGIN_API
from specdec_core.errors import PluginError
from specdec_core.plugins.discovery import Plugin
from specdec_core.plugins.loading import foreign_api


@frozen(eq=False)
class Offer:
    """One plugin's operations for a type of device."""

    plugin: Plugin
    spec: OpsSpec

    def supports(self, name: str, context: OpsContext) -> bool:
        """Whether the plugin offers that operation for these layers. Raises PluginError if its `supports` fails."""
        if name not in self.spec.ops:
            return False
        with self.plugin.blamed(f"say whether its {name!r} supports {_described(context)}"):
            return bool(self.spec.supports(name, context))


@frozen(eq=False)
class OfferedOps:
    """The operations that plugins offer for a type of device. `OfferedOps()` is empty."""

    offers: tuple[Offer, ...] = ()

    @classmethod
    def of(cls, plugins: Iterable[Plugin], device: str) -> OfferedOps:
        """Collect the operations of plugins. Raises PluginError if one fails or is written for another plugin API."""
        return cls(tuple(Offer(plugin, spec) for plugin in plugins for spec in _specs(plugin, device)))

    def choose(self, name: str, context: OpsContext) -> Callable[..., Any] | None:
        """Return a plugin's function for these layers; None if no plugin has one. Raises PluginError if several do."""
        able = [offer for offer in self.offers if offer.supports(name, context)]
        if len(able) > 1:
            raise PluginError(
                f"the operation {name!r} is replaced by {able[0].plugin.label} and by {able[1].plugin.label}, and both "
                f"support {_described(context)}: disable one of them, as in SPECDEC_DISABLE={able[1].plugin.name}"
            )
        return able[0].spec.ops[name] if able else None

    def check_names(self, known: Iterable[str]) -> None:
        """Raise PluginError if a plugin offers an operation whose name is not among core's (`known`)."""
        names = sorted(known)
        for offer in self.offers:
            if unknown := sorted(set(offer.spec.ops) - set(names)):
                raise PluginError(
                    f"plugin {offer.plugin.label} offers the operations {unknown}, which replace nothing: core has "
                    f"{names}. Update it, or disable it with SPECDEC_DISABLE={offer.plugin.name}"
                )


def _specs(plugin: Plugin, device: str) -> list[OpsSpec]:
    with plugin.blamed(f"offer its operations for {device!r}"):
        specs: list[OpsSpec] = plugin.loaded_hooks.hook.specdec_ops(device=device)  # without those that are None
        for spec in specs:
            if fault := _fault(spec):
                raise TypeError(f"specdec_ops returned {fault}")
    for spec in specs:
        if spec.api != PLUGIN_API:
            raise PluginError(f"{foreign_api(plugin, spec.api)}, or disable it with SPECDEC_DISABLE={plugin.name}")
    return specs


def _fault(spec: object) -> str | None:
    if not isinstance(spec, OpsSpec):
        form = "{name: function}"
        if isinstance(spec, Mapping):
            form = "{" + ", ".join(f"{name!r}: ..." for name in spec) + "}"
        return (
            f"{shown(spec)}, not an OpsSpec. Return OpsSpec(api={PLUGIN_API}, ops={form}), or None for a type of "
            f"device that the plugin has nothing for"
        )
    if spec.api != PLUGIN_API:
        return None  # whatever it has then
    if wrong := [name for name, function in spec.ops.items() if not callable(function)]:
        return f"an OpsSpec whose ops {wrong} are no functions"
    return None if callable(spec.supports) else f"an OpsSpec with supports={shown(spec.supports)}, which is no function"


def _described(context: OpsContext) -> str:
    layout = context.kv_layout
    has = [f"heads of {layout.key_dim} and {layout.value_dim}", *sorted(context.features)]
    return f"{context.dtype} layers with {', '.join(has)} on {context.device}"
