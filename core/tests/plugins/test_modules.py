"""Plugins that are not installed but loaded by module name."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from specdec_core import PluginError, Plugins, PluginWarning

PROPOSER = """
from attrs import frozen
from specdec_core import ProposerSpec, hookimpl

@frozen
class Config:
    pass

@hookimpl
def specdec_proposers():
    return [ProposerSpec({name!r}, Config, build=None, api={api})]
"""


def write(site: Any, module: str, name: str, api: int = 1) -> None:
    (site.path / f"{module}.py").write_text(PROPOSER.format(name=name, api=api))
    importlib.invalidate_caches()


def test_a_module_is_a_plugin_under_the_names_that_it_offers(site: Any) -> None:
    write(site, "loose", "loose_method")
    plugins = Plugins.load(modules=["loose"])
    assert plugins.proposer("loose_method").name == "loose_method"
    (info,) = [info for info in plugins.listing() if info.name == "loose"]
    assert (info.version, info.status, info.provides) == ("(not installed)", "ok", ("proposer loose_method",))
    with pytest.raises(PluginError, match="unknown proposer 'loose_method'"):
        Plugins.load().proposer("loose_method")


def test_it_claims_its_names_like_any_other(site: Any) -> None:
    site.proposer("shared")
    write(site, "loose", "shared")
    plugins = Plugins.load(modules=["loose"])
    with pytest.raises(PluginError, match=r"'shared' is claimed by loose \(not installed\) and dist-shared 1.0"):
        plugins.proposer("shared")


def test_what_is_wrong_with_it_is_told_under_the_methods_name(site: Any) -> None:
    write(site, "old", "old_method", api=0)
    with pytest.raises(PluginError, match=r"'old' .* is written for plugin API 0"):
        Plugins.load(modules=["old"]).proposer("old_method")
    with pytest.warns(PluginWarning, match="'absent' .* cannot be loaded: ModuleNotFoundError"):
        plugins = Plugins.load(modules=["absent"])
    with pytest.raises(PluginError, match=r"Not usable: absent \(failed\)"):
        plugins.proposer("any")


def test_a_subclass_loads_itself() -> None:
    class Mine(Plugins):
        pass

    assert isinstance(Mine.load(), Mine)
