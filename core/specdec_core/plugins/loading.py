"""Imports plugins and checks what they offer. A broken plugin does not affect the others.

`Plugins.load` warns about a broken plugin. Looking up one of its specs by name raises its error (`offers.Offers`).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import pluggy

from specdec_core.config.fields import shown
from specdec_core.config.options import Option, options_of
from specdec_core.contracts import hooks as hookspecs
from specdec_core.contracts.grammar import GrammarSpec
from specdec_core.contracts.kv import TARGET, KVManagerSpec
from specdec_core.contracts.proposer import PLUGIN_API, ProposerSpec
from specdec_core.contracts.verifier import VerifierSpec
from specdec_core.errors import PluginError, nearest
from specdec_core.plugins.discovery import GROUP, Plugin, Spec

KINDS: dict[type[Spec], str] = {
    ProposerSpec: "proposer",
    VerifierSpec: "verifier",
    KVManagerSpec: "kv_manager",
    GrammarSpec: "grammar",
}
OTHER_HOOKS = {"specdec_ops": "ops", "specdec_step_finished": "step_finished"}


def load_all(plugins: Iterable[Plugin]) -> list[str]:
    """Import the plugins whose status is "ok" so far. Returns the errors of those that cannot be loaded."""
    by_value: dict[tuple[str, str], list[Plugin]] = {}
    for plugin in plugins:
        by_value.setdefault((plugin.distribution, plugin.value), []).append(plugin)
    errors: list[str] = []
    for sharing in by_value.values():
        wanted = [plugin for plugin in sharing if plugin.status == "ok"]
        if wanted:
            load(wanted, declared={plugin.name for plugin in sharing})
        errors += dict.fromkeys(plugin.error for plugin in wanted if plugin.status == "failed" and plugin.error)
    return errors


def load(entries: Sequence[Plugin], declared: set[str]) -> None:
    """Import the module that these entry points share. Set `hooks` and `specs` of each, or the error if loading fails.

    declared: names of all entry points of that module, including disabled and refused ones.
    """
    first = entries[0]
    try:
        hooks = _import(first)
        specs = _specs(hooks, None if first.builtin else declared, first)
    except (Exception, SystemExit) as error:
        names = ", ".join(repr(plugin.name) for plugin in entries)
        message = (
            f"plugin {names} ({first.distribution} {first.version}) cannot be loaded: "
            f"{type(error).__name__}: {error}. Repair or update {first.distribution}, uninstall it, or disable it "
            f"with SPECDEC_DISABLE={first.distribution}"
        )
        for plugin in entries:
            plugin.refuse("failed", message, error)
        return
    for plugin in entries:
        plugin.hooks = hooks
        plugin.specs = [spec for spec in specs if plugin.builtin or spec.name == plugin.name]
        _check(plugin)


def provides(plugin: Plugin) -> tuple[str, ...]:
    """What the plugin offers, such as "proposer ngram", "command ngram", "ops", "step_finished", "model tiny"."""
    if plugin.word == "model":
        return (f"model {plugin.name}",) if plugin.status == "ok" else ()
    named = [f"{KINDS[type(spec)]} {spec.name}" for spec in plugin.specs]
    if _implements(plugin, "specdec_commands"):
        named += _commands(plugin)
    return (*named, *(word for hook, word in OTHER_HOOKS.items() if _implements(plugin, hook)))


def options(plugin: Plugin) -> dict[str, tuple[Option, ...]]:
    """The configuration options of a plugin's specs, by name, such as "proposer ngram". Omits specs without any."""
    configs = {f"{KINDS[type(spec)]} {spec.name}": getattr(spec, "config", None) for spec in plugin.specs}
    return {name: found for name, config in configs.items() if config is not None and (found := options_of(config))}


def foreign_api(plugin: Plugin, api: object) -> str:
    """The error message for a plugin that is written for another version of the plugin API than core has."""
    return (
        f"plugin {plugin.label} is written for plugin API {shown(api)}, but this specdec-core has plugin API "
        f"{PLUGIN_API}: install a version of {plugin.distribution} for plugin API {PLUGIN_API}, or a specdec-core with "
        f"plugin API {shown(api)}"
    )


def _implements(plugin: Plugin, hook: str) -> bool:
    return plugin.hooks is not None and bool(getattr(plugin.hooks.hook, hook).get_hookimpls())


def _commands(plugin: Plugin) -> list[str]:
    from specdec_core.plugins.commands import offered

    try:
        return [f"command {command.name}" for command in offered(plugin)]
    except PluginError:  # the listing has it as the plugin's error
        return ["commands"]


def _import(plugin: Plugin) -> pluggy.PluginManager:
    value = importlib.metadata.EntryPoint(plugin.name, plugin.value, GROUP).load()
    hooks = pluggy.PluginManager(hookspecs.PROJECT)
    hooks.add_hookspecs(hookspecs)
    known = list(vars(hooks.hook))
    hooks.register(value, name=plugin.value)
    unknown = [name for name in vars(hooks.hook) if name not in known]
    try:
        hooks.check_pending()
    except pluggy.PluginValidationError as error:
        near = [match for name in unknown if (match := nearest(name, known))]
        hint = f"did you mean {near[0]}?" if near else f"the hooks are {', '.join(sorted(known))}"
        raise PluginError(f"{plugin.value} implements no hook with {', '.join(unknown)}: {hint}") from error
    return hooks


def _specs(hooks: pluggy.PluginManager, declared: set[str] | None, plugin: Plugin) -> list[Spec]:
    found: list[Spec] = []
    for kind, word in KINDS.items():
        hook = f"specdec_{word}s"
        for offered in getattr(hooks.hook, hook)():
            if not isinstance(offered, list | tuple) or not all(isinstance(spec, kind) for spec in offered):
                raise PluginError(f"{plugin.value}: {hook} returned {shown(offered)}, not a list of {kind.__name__}")
            found += offered
    seen: set[tuple[type[Spec], str]] = set()
    for spec in found:
        what = f"{KINDS[type(spec)]} {spec.name!r}"
        config: Any = getattr(spec, "config", None)
        if (config is not None or isinstance(spec, ProposerSpec)) and not attrs.has(config):
            raise PluginError(f"{plugin.value}: the config of the {what} is {shown(config)}, not an attrs class")
        if isinstance(spec, ProposerSpec) and spec.name == TARGET:
            raise PluginError(f"{plugin.value} offers the {what}: that name stands for the target. Give it another")
        if (type(spec), spec.name) in seen:
            raise PluginError(f"{plugin.value} offers the {what} twice: rename one of them")
        if declared is not None and spec.name not in declared:
            raise PluginError(
                f"{plugin.value} offers the {what}, but {plugin.distribution} has no entry point of that name (it has "
                f"{', '.join(sorted(declared))}): rename the {KINDS[type(spec)]}, or add {spec.name} = "
                f'"{plugin.value}" to the entry points of group {GROUP}'
            )
        seen.add((type(spec), spec.name))
    return found


def _check(plugin: Plugin) -> None:
    foreign = sorted({spec.api for spec in plugin.specs if spec.api != PLUGIN_API}, key=str)
    if foreign:
        plugin.refuse("incompatible", foreign_api(plugin, foreign[0]))
    elif not plugin.specs and not any(_implements(plugin, hook) for hook in (*OTHER_HOOKS, "specdec_commands")):
        plugin.refuse(
            "failed",
            f"plugin {plugin.label} offers nothing: no function of {plugin.value} that is marked @hookimpl implements "
            f"a hook for {plugin.name!r}. Mark one, or name its spec {plugin.name!r}",
        )
