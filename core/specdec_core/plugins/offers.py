"""Looks up proposers, verifiers and KV managers by name, and the compiler of grammars."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from specdec_core.config.fields import shown
from specdec_core.contracts.grammar import GrammarSpec
from specdec_core.contracts.kv import KVManagerSpec
from specdec_core.contracts.proposer import ProposerSpec
from specdec_core.contracts.verifier import VerifierSpec
from specdec_core.errors import ConfigError, PluginError, did_you_mean
from specdec_core.plugins.discovery import Plugin, Spec, refuse_rivals
from specdec_core.plugins.loading import KINDS, provides

S = TypeVar("S", ProposerSpec, VerifierSpec, KVManagerSpec, GrammarSpec)

PACKAGES = Path(__file__).with_name("packages.json")
"""Which package of specdec's repository provides what, for errors alone; docs/package_table.py writes it."""


class Offers:
    """The specs that plugins offer. If two of a class share a name, neither is used; the later plugin gets an error."""

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        self._plugins = plugins
        self._specs: dict[tuple[type[Spec], str], tuple[Spec, Plugin]] = {}
        self._aliases: dict[tuple[type[Spec], str], str] = {}
        self._first_of_value: dict[str, Plugin] = {}
        self._packages: dict[str, str] = json.loads(PACKAGES.read_text(encoding="utf-8"))
        for plugin in plugins:
            if plugin.status == "ok":
                self._add(plugin)

    @property
    def modules(self) -> Collection[Plugin]:
        """One `Plugin` for each module: several entry points may share a module, whose hooks are called only once."""
        return self._first_of_value.values()

    def find(self, kind: type[S], name: str) -> S:
        """The spec of this class and name. Raises PluginError, with the reason and advice, if it is unavailable."""
        name = name if (kind, name) in self._specs else self._aliases.get((kind, name), name)
        if (kind, name) in self._specs:
            spec, plugin = self._specs[kind, name]
            if problem := missing_modules(plugin, spec):
                raise PluginError(problem)
            return cast(S, spec)
        word = KINDS[kind]
        for plugin in self._plugins:
            if plugin.error and (plugin.name == name or any(spec.name == name for spec in plugin.specs)):
                raise PluginError(plugin.error) from plugin.cause
            if plugin.name == name:
                offers = ", ".join(provides(plugin))
                raise PluginError(f"plugin {plugin.label} offers no {word}, only: {offers}. {self._installed(kind)}")
        if package := self._packages.get(f"{word} {name}"):
            raise PluginError(f"{word} {name!r} is not installed: install {package}. {self._installed(kind)}")
        known = {*self.names(kind), *(plugin.name for plugin in self._plugins if plugin.error)}
        known |= {each.removeprefix(f"{word} ") for each in self._packages if each.startswith(f"{word} ")}
        raise PluginError(f"unknown {word} {shown(name)}.{did_you_mean(name, known)} {self._installed(kind)}")

    def only(self, kind: type[S]) -> S:
        """The one spec of this class. Raises ConfigError, with advice, if there is none or more than one."""
        word, names = KINDS[kind], self.names(kind)
        if len(names) == 1:
            return self.find(kind, names[0])
        if names:
            raise ConfigError(
                f"the {word}s {' and '.join(names)} are installed, and one is used: disable all but one, as in "
                f"SPECDEC_DISABLE={names[-1]}"
            )
        packages = sorted({package for what, package in self._packages.items() if what.startswith(f"{word} ")})
        raise ConfigError(f"no plugin with a {word} is usable: install {' or '.join(packages)}.{self._unusable}")

    def names(self, kind: type[S]) -> list[str]:
        """The names of all specs of this class, sorted."""
        return sorted(name for kind_, name in self._specs if kind_ is kind)

    def recognize(self, config: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """What a draft checkpoint is, such as "an EAGLE head", by the name of each proposer that recognizes it."""
        found = {}
        for spec, plugin in self._specs.values():
            if isinstance(spec, ProposerSpec) and spec.detect is not None:
                with plugin.blamed("look at the draft checkpoint", "Name the method"):
                    if kind := spec.detect(config, tensor_shapes):
                        found[spec.name] = kind if isinstance(kind, str) else f"a draft for {spec.name!r}"
        return found

    def detect(self, config: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Return the one proposer that recognizes a draft checkpoint. Raises PluginError unless exactly one does."""
        names = list(self.recognize(config, tensor_shapes))
        if len(names) == 1:
            return names[0]
        if names:
            owners = " and ".join(self._specs[ProposerSpec, name][1].label for name in names)
            raise PluginError(f"the draft checkpoint is claimed by {owners}: name the one you mean as `method`")
        kind = config.get("model_type", config.get("speculators_model_type"))
        advice = f"Name one as `method`, or install {self._packages.get(f'proposer {kind}', 'its plugin')}"
        if kind in self.names(ProposerSpec):
            advice = f"The installed method {kind!r} does not, either: name it as `method` to see why"
        what = f"no installed proposer recognizes the draft checkpoint, whose model_type is {shown(kind)}"
        raise PluginError(f"{what}. {advice}. {self._installed(ProposerSpec)}")

    def _add(self, plugin: Plugin) -> None:
        keys = {(type(spec), spec.name): spec for spec in plugin.specs}
        rivals = [self._specs[key][1] for key in keys if key in self._specs]
        if rivals:  # rivals with entry points of one name were refused before loading
            refuse_rivals(plugin.name, [rivals[0], plugin], refused=[plugin])
            for key in keys:
                self._specs.pop(key, None)
            return
        self._specs.update({key: (spec, plugin) for key, spec in keys.items()})
        self._aliases |= {(type(s), a): s.name for s in plugin.specs if isinstance(s, ProposerSpec) for a in s.aliases}
        self._first_of_value.setdefault(plugin.value, plugin)

    def _installed(self, kind: type[S]) -> str:
        word = KINDS[kind]
        names = self.names(kind)
        text = f"Installed: {', '.join(names)}." if names else f"No {word} is installed: pip install one."
        return text + self._unusable

    @property
    def _unusable(self) -> str:
        names = sorted({f"{plugin.name} ({plugin.status})" for plugin in self._plugins if plugin.error})
        return f" Not usable: {', '.join(names)}, see `spec-decode plugins`." if names else ""


def missing_modules(plugin: Plugin, spec: Spec) -> str | None:
    """Return an error message if modules that a proposer requires are not installed, else None. Imports nothing."""
    if not isinstance(spec, ProposerSpec):
        return None
    roots = [module.partition(".")[0] for module in spec.requires]  # find_spec of "a.b" would import a
    missing = [root for root in roots if root not in sys.modules and importlib.util.find_spec(root) is None]
    if not missing:
        return None
    return (
        f"proposer {spec.name!r} ({plugin.distribution} {plugin.version}) requires modules that are not installed: "
        f"{', '.join(missing)}. `pip install {plugin.distribution}` brings the plugin's dependencies; failing that, "
        f"`pip install {' '.join(missing)}`"
    )
