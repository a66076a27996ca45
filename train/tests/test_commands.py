"""The command line of `spec-decode train`, with every package of this repository installed."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from specdec_core import Plugins
from specdec_core.cli import main

TRAINABLE = ("draft_model", "eagle", "eagle3")


@pytest.fixture(autouse=True)
def _with_an_offer_that_has_no_name():
    """Skip the tests unless a plugin that offers operations (kernels) is installed. Such a plugin has no method name,
    and the list of methods must leave it out."""
    if not any("ops" in info.provides for info in Plugins.load().listing()):
        pytest.skip("no plugin is installed that offers operations")


def train(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["train", *arguments])


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_methods_are_listed(arguments: list[str]):
    result = train(*arguments)
    assert not isinstance(result.exception, Exception), result.exc_info
    listed = [line.split()[0] for line in result.output.partition("Commands:")[2].splitlines() if line.strip()]
    assert set(TRAINABLE) <= {*listed}
    assert "ngram" not in listed


@pytest.mark.parametrize(
    ("name", "why"), [("nosuch", "unknown proposer 'nosuch'"), ("ngram", ""), ("ops", "unknown proposer 'ops'")]
)
def test_another_method_is_refused(name: str, why: str):
    result = train(name)
    assert result.exit_code == 2
    assert f"Error: {name!r} is not a method with a training recipe. {why}" in result.output
    assert f" Methods with one: {', '.join(TRAINABLE)}" in result.output


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_method_says_its_options(name: str):
    result = train(name, "--help")
    assert result.exit_code == 0, result.output
    assert "--target" in result.output
