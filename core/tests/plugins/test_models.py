"""Models shipped in Python distributions are found, refused, disabled and listed in the same way as plugins."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specdec_core import LLM, ConfigError, PluginError, Plugins, PluginWarning, cli, resolve_model

WAYS: list[Callable[[str], str]] = [resolve_model, lambda name: resolve_model(name, Plugins.load().models)]
"""As plugins ask that have no `Plugins`, and as an engine asks."""


@pytest.fixture(params=WAYS, ids=["alone", "of Plugins"])
def resolve(request: pytest.FixtureRequest) -> Callable[[str], str]:
    return request.param


def lines(plugins: Plugins, name: str) -> list[tuple[Any, ...]]:
    return [(line.distribution, line.status, line.provides) for line in plugins.listing() if line.name == name]


def test_a_model_and_what_is_none(site, resolve):
    folder = site.model("small", "dist-small")
    assert resolve("small") == str(folder)
    for other in ("./small", "smaller", "dist-small", str(folder), "their/small"):
        assert resolve(other) == other
    assert resolve(Path("a", "small")) == "a/small"


def test_two_distributions_that_claim_a_name_are_both_refused(site, resolve):
    site.model("twin", "dist-left")
    site.model("twin", "dist-right")
    with pytest.raises(PluginError, match=r"the name 'twin' is claimed by dist-left 1\.0 and dist-right 1\.0, so none"):
        resolve("twin")
    assert lines(Plugins.load(), "twin") == [("dist-left", "duplicate", ()), ("dist-right", "duplicate", ())]
    assert not {"dist_left_module", "dist_right_module"} & sys.modules.keys()


def test_the_environment_disables_one_of_two(site, resolve, monkeypatch):
    folder = site.model("twin", "dist-left")
    site.model("twin", "dist-right")
    monkeypatch.setenv("SPECDEC_DISABLE", "dist_Right")
    assert resolve("twin") == str(folder)
    monkeypatch.setenv("SPECDEC_DISABLE", "twin")
    with pytest.raises(
        PluginError,
        match=r"model 'twin' \(dist-left 1\.0\) is disabled by the environment variable SPECDEC_DISABLE, which names "
        r"'twin'",
    ):
        resolve("twin")


def test_the_argument_disables_one_of_two(site):
    site.model("twin", "dist-left")
    folder = site.model("twin", "dist-right")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugins = Plugins.load(disable=["dist-left"])
    assert resolve_model("twin", plugins.models) == str(folder)
    assert [status for _, status, _ in lines(plugins, "twin")] == ["disabled", "ok"]
    assert lines(plugins, "twin")[1][2] == ("model twin",)


def test_an_engine_asks_its_plugins(site):
    """An engine looks up its target, its tokenizer and its draft model in the plugins that it was given."""
    site.model("twin", "dist-left")
    folder = site.model("twin", "dist-right")
    plugins = Plugins.load(disable="dist-left")
    with pytest.raises(ConfigError, match=f"model={str(folder)!r} cannot be read"):
        LLM("twin", plugins=plugins)
    with pytest.raises(PluginError, match=r"claimed by dist-left 1\.0 and dist-right 1\.0"):
        LLM("twin")
    for keywords in (
        {"model": "twin"},
        {"model": "other", "tokenizer": "twin"},
        {"model": "other", "speculative_config": {"model": "twin"}},
    ):
        with pytest.raises(PluginError, match=r"model 'twin' \(dist-left 1.0\) is disabled by the argument disable"):
            LLM(**keywords, plugins=Plugins.load(disable="twin"))


@pytest.mark.parametrize("name", ["meta-llama/Llama-3", ".", "..", ".hidden", "C:\\model", "/models/mine", "a b"])
def test_names_that_may_be_of_folders_or_on_the_hub(site, name, monkeypatch):
    site.model(name, "dist-greedy")
    assert resolve_model(name) == name
    with pytest.warns(PluginWarning, match="may be of a folder, or on the model hub") as caught:
        plugins = Plugins.load()
    assert len(caught) == 1
    assert resolve_model(name, plugins.models) == name
    assert lines(plugins, name) == [("dist-greedy", "failed", ())]
    monkeypatch.setenv("SPECDEC_DISABLE", "dist-greedy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_model(name, Plugins.load().models) == name


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("def path():\n    raise SystemExit(3)", "SystemExit: 3"),
        ("other = 1", "AttributeError"),
        ("path = 'no function'", "'str' object is not callable"),
        ("def path():\n    return 'gpt2'", "NotADirectoryError: dist_broken_module:path returned 'gpt2'"),
        ("def path():\n    return None", "TypeError"),
    ],
)
def test_one_that_cannot_be_had_says_whose_it_is(site, resolve, source, says):
    site.model("broken", "dist-broken", source)
    with pytest.raises(PluginError) as caught:
        resolve("broken")
    assert "model 'broken' (dist-broken 1.0) failed to give the folder of the model: " in str(caught.value)
    assert says in str(caught.value)
    assert "disable it with SPECDEC_DISABLE=broken" in str(caught.value)


def test_the_listing_imports_none(site):
    site.model("small", "dist-small", "raise RuntimeError('imported')")
    result = CliRunner().invoke(cli.main, ["plugins", "small", "--json"])
    assert result.exit_code == 0, result.output
    [found] = json.loads(result.stdout)
    assert (found["name"], found["distribution"], found["status"]) == ("small", "dist-small", "ok")
    assert found["provides"] == ["model small"]
    result = CliRunner().invoke(cli.main, ["plugins", "--disable", "small"], env={"COLUMNS": "200"})
    assert "model 'small' (dist-small 1.0) is disabled by the argument disable (--disable)" in result.stdout


def test_a_plugin_of_the_same_name_is_another_matter(site):
    folder = site.model("both", "dist-model")
    site.proposer("both", distribution="dist-plugin")
    plugins = Plugins.load()
    assert resolve_model("both", plugins.models) == str(folder)
    assert plugins.proposer("both").name == "both"
    assert [provided for _, _, provided in lines(plugins, "both")] == [("proposer both",), ("model both",)]
