"""Finds installed plugins without importing them."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import pluggy
from attrs import define, field

import specdec_core
from specdec_core.contracts.grammar import GrammarSpec
from specdec_core.contracts.kv import KVManagerSpec
from specdec_core.contracts.proposer import ProposerSpec
from specdec_core.contracts.verifier import VerifierSpec
from specdec_core.errors import PluginError

GROUP, MODEL_GROUP = "specdec", "specdec.models"

MODEL_NAME = re.compile(r"[\w-][\w.-]*")  # no name of a folder, or of a repository on the hub
VARIABLE = "the environment variable SPECDEC_DISABLE"

Status = Literal["ok", "failed", "incompatible", "duplicate", "disabled"]
Spec = ProposerSpec | VerifierSpec | KVManagerSpec | GrammarSpec


@define(eq=False)
class Plugin:
    """A plugin with its status: an entry point of group `specdec`, or a module that is loaded like one. A model that a
    distribution embeds (`models/embedded.py`) is listed as a plugin, too, but has neither hooks nor specs."""

    name: str
    distribution: str
    version: str
    value: str  # "package.module" or "package.module:object"
    word: str = "plugin"  # or "model"
    builtin: bool = False  # no entry point: a module of core, or one named by the caller
    status: Status = "ok"
    error: str | None = None  # why the status is not ok, and what to do
    cause: BaseException | None = None
    hooks: pluggy.PluginManager | None = None  # knows this plugin alone; shared by entry points of equal value
    specs: list[Spec] = field(factory=list)

    @property
    def label(self) -> str:
        return f"{self.name!r} ({self.distribution} {self.version})"

    @property
    def loaded_hooks(self) -> pluggy.PluginManager:
        assert self.hooks is not None, "a plugin whose status is ok after loading has hooks"
        return self.hooks

    @contextmanager
    def blamed(self, what: str, advice: str = "Repair it") -> Iterator[None]:
        """Return a context that turns exceptions, SystemExit too, into PluginError "plugin NAME failed to {what}"."""
        try:
            yield
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{self.word} {self.label} failed to {what}: {type(error).__name__}: {error}. {advice}, or disable it "
                f"with SPECDEC_DISABLE={self.name}"
            ) from error

    def refuse(self, status: Status, error: str, cause: BaseException | None = None) -> None:
        self.status, self.error, self.cause = status, error, cause


def find(builtins: Iterable[str], modules: Iterable[str] = ()) -> list[Plugin]:
    """List core's own modules, then `modules` that the caller names, then all installed entry points by name.

    A distribution that is on sys.path twice (an editable install and a wheel, say) counts once: only the one that
    Python would import is listed.
    """
    core = ("specdec-core", specdec_core.__version__)
    found = [Plugin(module.rpartition(".")[2], *core, module, builtin=True) for module in builtins]
    found += [Plugin(module, module, "(not installed)", module, builtin=True) for module in modules]
    return found + entries(GROUP)


def entries(group: str, word: str = "plugin") -> list[Plugin]:
    """The installed entry points of a group, sorted by name. word: what messages call one, "plugin" or "model"."""
    found = []
    for entry in importlib.metadata.entry_points(group=group):
        assert entry.dist is not None, "entry_points() sets it"
        found.append(Plugin(entry.name, entry.dist.name, entry.dist.version, entry.value, word))
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution))


def find_models() -> list[Plugin]:
    """Return the embedded models, which come with installed distributions. A model is marked as failed if its name
    could be that of a folder or of a repository on the model hub."""
    found = entries(MODEL_GROUP, "model")
    for model in found:
        if not MODEL_NAME.fullmatch(model.name):
            why = "a name that may be of a folder, or on the model hub: letters, digits, '-', '_' and '.' are allowed"
            model.refuse("failed", f"model {model.label} has {why}. Update or uninstall {model.distribution}")
    return found


def names_in(text: str | Iterable[str]) -> list[str]:
    """Split a string such as "a,b", or each of several such strings, into a list of names."""
    parts = text.split(",") if isinstance(text, str) else [name for part in text for name in part.split(",")]
    return [part.strip() for part in parts if part.strip()]


def refuse_disabled(plugins: Sequence[Plugin], names: Sequence[str], origin: str) -> list[str]:
    """Disable plugins by plugin or distribution name. Returns unmatched names. origin: who gave `names`, for errors."""
    idle = []
    for name in names:
        hit = [p for p in plugins if not p.builtin and (name == p.name or _same(name, p.distribution))]
        for plugin in hit:
            plugin.refuse("disabled", f"{plugin.word} {plugin.label} is disabled by {origin}, which names {name!r}")
        if not hit:
            idle.append(name)
    return idle


def refuse_duplicates(plugins: Sequence[Plugin]) -> None:
    """Mark plugins of the same name from different distributions as duplicates, since users may mean any of them."""
    by_name: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        if plugin.status == "ok" and not plugin.builtin:
            by_name.setdefault(plugin.name, []).append(plugin)
    for rivals in by_name.values():
        if len(rivals) > 1:
            refuse_rivals(rivals[0].name, rivals, rivals)


def refuse_rivals(name: str, rivals: Sequence[Plugin], refused: Sequence[Plugin]) -> None:
    """Mark the plugins `refused` as duplicates. Their error lists all plugins that have this name (`rivals`)."""
    owners = " and ".join(f"{plugin.distribution} {plugin.version}" for plugin in rivals)
    for plugin in refused:
        plugin.refuse(
            "duplicate",
            f"the name {name!r} is claimed by {owners}, so none of them is used: uninstall all but one, or disable "
            f"them by distribution, as in SPECDEC_DISABLE={rivals[-1].distribution}",
        )


def _same(*distributions: str) -> bool:
    return len({re.sub(r"[-_.]+", "-", name).lower() for name in distributions}) == 1
