"""Load all plugins, choose one by name, and say why there is none."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from attrs import frozen

from specdec_core.errors import PluginError
from specdec_core.kv_manager import KVManagerSpec
from specdec_core.plugins import discovery, loading
from specdec_core.plugins.discovery import Plugin, Spec, Status
from specdec_core.proposer import ProposerSpec
from specdec_core.verifier import VerifierSpec

if TYPE_CHECKING:
    import click

    from specdec_core.plugins.commands import PluginCommands
    from specdec_core.types import StepReport

BUILTINS = ("specdec_core.builtin",)
"""Modules of core that offer its own parts through the same hooks as any plugin, and are imported like one."""

S = TypeVar("S", ProposerSpec, VerifierSpec, KVManagerSpec)


class PluginWarning(UserWarning):
    """A plugin could not be loaded, and the others are; or it failed where nobody was there to hear of it."""


@frozen
class PluginInfo:
    """One line of the listing."""

    name: str
    distribution: str
    version: str
    status: Status
    provides: tuple[str, ...]  # "proposer ngram", "verifier greedy", "kv_manager paged", "command ngram", "ops" ...
    error: str | None  # why the status is not "ok", and what to do


class Plugins:
    """The plugins that one engine, command or test uses. `Plugins.load()` makes one; nothing here is global."""

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        self._plugins = plugins
        self._offers: dict[tuple[type[Spec], str], tuple[Spec, Plugin]] = {}
        self._modules: dict[str, Plugin] = {}  # for each value that was imported, the first plugin it belongs to
        for plugin in plugins:
            self._add(plugin)
        hooks = [(plugin, plugin.loaded_hooks.hook.specdec_step_finished) for plugin in self._modules.values()]
        self._listeners = [(plugin, hook) for plugin, hook in hooks if hook.get_hookimpls()]

    @classmethod
    def load(
        cls, disable: str | Iterable[str] = (), *, modules: Sequence[str] = (), builtins: Sequence[str] = BUILTINS
    ) -> Self:
        """Import every plugin that is installed and not disabled.

        disable: names of plugins or of distributions, besides those in the environment variable SPECDEC_DISABLE.
        A name that is not installed causes a UserWarning. modules: more of them, not installed (yet), by the names that
        they are imported under. builtins: modules to load as core's own.

        A plugin that cannot be loaded causes one PluginWarning now and a PluginError when it is asked for; the others
        load.
        """
        plugins = discovery.find(builtins, modules)
        for origin, names in {
            "the environment variable SPECDEC_DISABLE": os.environ.get("SPECDEC_DISABLE", ""),
            "the argument disable (--disable)": disable,
        }.items():
            for name in discovery.refuse_disabled(plugins, discovery.names_in(names), origin):
                warnings.warn(f"{origin} names {name!r}, which is not installed", stacklevel=2)
        discovery.refuse_duplicates(plugins)
        by_value: dict[tuple[str, str], list[Plugin]] = {}
        for plugin in plugins:
            by_value.setdefault((plugin.distribution, plugin.value), []).append(plugin)
        for sharing in by_value.values():
            wanted = [plugin for plugin in sharing if plugin.status == "ok"]
            if wanted:
                loading.load(wanted, declared={plugin.name for plugin in sharing})
            for error in dict.fromkeys(plugin.error for plugin in wanted if plugin.status == "failed"):
                warnings.warn(f"{error}. The other plugins are loaded", PluginWarning, stacklevel=2)
        return cls(plugins)

    def proposer(self, name: str) -> ProposerSpec:
        """The proposer of that name. Raises PluginError, which says why there is none and what to do."""
        spec, plugin = self._find(ProposerSpec, name)
        problem = _missing_modules(plugin, spec)
        if problem:
            raise PluginError(problem)
        return spec

    def verifier(self, name: str) -> VerifierSpec:
        """The verifier of that name. Raises PluginError, which says why there is none and what to do."""
        return self._find(VerifierSpec, name)[0]

    def kv_manager(self, name: str) -> KVManagerSpec:
        """The KV manager of that name. Raises PluginError, which says why there is none and what to do."""
        return self._find(KVManagerSpec, name)[0]

    def detect(self, config: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]) -> ProposerSpec:
        """The one proposer that recognises a draft checkpoint.

        config: the checkpoint's configuration. tensor_shapes: {tensor name: shape}. Raises PluginError if none or more
        than one claims it.
        """
        claims: list[tuple[Spec, Plugin]] = []
        for spec, plugin in self._offers.values():
            if isinstance(spec, ProposerSpec) and spec.detect is not None:
                try:
                    claimed = spec.detect(config, tensor_shapes)
                except Exception as error:
                    raise PluginError(
                        f"plugin {plugin.label} failed to look at the draft checkpoint: {type(error).__name__}: "
                        f"{error}. Name the method, or disable the plugin with SPECDEC_DISABLE={plugin.name}"
                    ) from error
                if claimed:
                    claims.append((spec, plugin))
        if len(claims) == 1:
            return self.proposer(claims[0][0].name)
        if claims:
            owners = " and ".join(plugin.label for _, plugin in claims)
            raise PluginError(f"the draft checkpoint is claimed by {owners}: name the one you mean as `method`")
        raise PluginError(
            "no installed proposer recognises the draft checkpoint: name one as `method`, or install the plugin for "
            f"it. {self._installed(ProposerSpec)}"
        )

    def ops(self, device: str) -> dict[str, Callable[..., Any]]:
        """{name: function} of every operation that a plugin replaces on this type of device ("cpu", "cuda").

        Raises PluginError if two plugins replace the same operation, or one fails.
        """
        found: dict[str, Callable[..., Any]] = {}
        owners: dict[str, Plugin] = {}
        for plugin in self._modules.values():
            try:
                offered = plugin.loaded_hooks.hook.specdec_ops(device=device)
                pairs = [(name, function) for mapping in offered for name, function in mapping.items()]
            except Exception as error:
                raise PluginError(
                    f"plugin {plugin.label} failed to offer its operations for {device!r}: {type(error).__name__}: "
                    f"{error}. Repair it, or disable it with SPECDEC_DISABLE={plugin.name}"
                ) from error
            for name, function in pairs:
                if name in owners:
                    raise PluginError(
                        f"the operation {name!r} is replaced by {owners[name].label} and by {plugin.label}: disable "
                        f"one of them, as in SPECDEC_DISABLE={plugin.name}"
                    )
                found[name], owners[name] = function, plugin
        return found

    @property
    def step_finished(self) -> Callable[[StepReport], None] | None:
        """Calls `specdec_step_finished` of all plugins; None if no plugin implements it, so that nothing is called."""
        if not self._listeners:
            return None
        return self._tell_listeners

    def _tell_listeners(self, report: StepReport) -> None:
        for plugin, hook in self._listeners:
            try:
                hook(report=report)
            except (Exception, SystemExit) as error:
                raise PluginError(
                    f"plugin {plugin.label} failed to hear about a step: {type(error).__name__}: {error}. Repair it, "
                    f"or disable it with SPECDEC_DISABLE={plugin.name}"
                ) from error

    def commands(self, core: Collection[str] = ()) -> PluginCommands:
        """What plugins add to the command line. core: the names of its own commands, which no plugin may take."""
        from specdec_core.plugins.commands import PluginCommands

        return PluginCommands.of(self._modules.values(), core)

    def command(self, name: str, core: Collection[str] = ()) -> click.Command | None:
        """The command of that name; None if there is none. Raises PluginError if a plugin of that name, or one that
        offers it, is not usable."""
        commands = self.commands(core)
        if name in commands.usable:
            return commands.usable[name]
        for fault in commands.faults:
            if fault.name == name:
                raise fault.error
        for plugin in self._plugins:
            if plugin.error and plugin.name == name:
                raise PluginError(plugin.error) from plugin.cause
        return None

    def listing(self, core_commands: Collection[str] = ()) -> list[PluginInfo]:
        """Every plugin, the unusable ones too, with what is wrong. core_commands: see `commands`."""
        lines = []
        faults = {plugin.value: fault for fault in self.commands(core_commands).faults for plugin in fault.plugins}
        for plugin in self._plugins:
            problems = [_missing_modules(plugin, spec) for spec in plugin.specs if plugin.status == "ok"]
            if plugin.status == "ok" and plugin.value in faults:
                problems.append(str(faults[plugin.value].error))
            problem = next(filter(None, problems), None)
            lines.append(
                PluginInfo(
                    name=plugin.name,
                    distribution=plugin.distribution,
                    version=plugin.version,
                    status="failed" if problem else plugin.status,
                    provides=loading.provides(plugin),
                    error=problem or plugin.error,
                )
            )
        return lines

    def _add(self, plugin: Plugin) -> None:
        if plugin.status != "ok":
            return
        keys = {(type(spec), spec.name): spec for spec in plugin.specs}
        rivals = [self._offers[key][1] for key in keys if key in self._offers]
        if rivals:  # entry points of one name were refused before loading: the rival has none
            discovery.refuse_rivals(plugin.name, [rivals[0], plugin], refused=[plugin])
            for key in keys:
                self._offers.pop(key, None)
            return
        self._offers.update({key: (spec, plugin) for key, spec in keys.items()})
        self._modules.setdefault(plugin.value, plugin)

    def _find(self, kind: type[S], name: str) -> tuple[S, Plugin]:
        if (kind, name) in self._offers:
            spec, plugin = self._offers[kind, name]
            return cast(S, spec), plugin
        word = loading.KINDS[kind]
        for plugin in self._plugins:
            if plugin.error and (plugin.name == name or any(spec.name == name for spec in plugin.specs)):
                raise PluginError(plugin.error) from plugin.cause
            if plugin.name == name:
                offers = ", ".join(loading.provides(plugin))
                raise PluginError(f"plugin {plugin.label} offers no {word}, only: {offers}. {self._installed(kind)}")
        known = {offered for kind_, offered in self._offers if kind_ is kind}
        near = get_close_matches(name, known | {p.name for p in self._plugins if p.error}, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PluginError(f"unknown {word} {name!r}.{hint} {self._installed(kind)}")

    def _installed(self, kind: type[Spec]) -> str:
        word = loading.KINDS[kind]
        names = sorted(name for kind_, name in self._offers if kind_ is kind)
        text = f"Installed: {', '.join(names)}." if names else f"No {word} is installed: pip install one."
        unusable = sorted({f"{plugin.name} ({plugin.status})" for plugin in self._plugins if plugin.error})
        return text + (f" Not usable: {', '.join(unusable)}, see `spec-decode plugins`." if unusable else "")


def _missing_modules(plugin: Plugin, spec: Spec) -> str | None:
    """What to tell the user if a module that a proposer requires is not installed. Imports nothing."""
    if not isinstance(spec, ProposerSpec):
        return None
    # find_spec of "a.b" would import a
    roots = [module.partition(".")[0] for module in spec.requires]
    missing = [root for root in roots if root not in sys.modules and importlib.util.find_spec(root) is None]
    if not missing:
        return None
    return (
        f"proposer {spec.name!r} ({plugin.distribution} {plugin.version}) requires modules that are not installed: "
        f"{', '.join(missing)}. `pip install {plugin.distribution}` brings the plugin's dependencies; failing that, "
        f"`pip install {' '.join(missing)}`"
    )
