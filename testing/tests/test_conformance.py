"""Tests of the conformance kit's command line, and of the errors for wrong subclasses of its test class.
test_conformance_cases.py tests the kit's checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import example_proposer
import pytest

from specdec_core import PluginError
from specdec_testing import KVManagerConformance, ProposerConformance, VerifierConformance, pytest_plugin, tiny_target
from specdec_testing.conformance import test_proposer
from specdec_testing.conformance.held_objects import HeldObjects

HERE = Path(__file__).parent
HELPERS = HERE, Path(example_proposer.__file__).parent


def run_pytest(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*map(str, HELPERS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


@pytest.mark.nightly
def test_from_the_command_line(tmp_path: Path) -> None:
    kit = ("--pyargs", "specdec_testing.conformance", "--specdec-proposer", "recent")
    options = ("--specdec-module", "example_proposer", "--specdec-option", "recent_max_chain=2")
    skip = ("--specdec-skip", "test_q_rows=it samples nothing")
    chosen = ("-k", "test_is_offered or test_unknown_options or test_vocabulary or test_q_rows")
    result = run_pytest(*kit, *options, *skip, *chosen, cwd=tmp_path)
    assert (result.returncode, "3 passed, 1 skipped" in result.stdout) == (0, True), result.stdout + result.stderr


def command_line(**options: object) -> SimpleNamespace:
    """Return a stand-in for pytest's configuration object, in which these command-line options of the kit are set."""
    given = {"--specdec-proposer": None, "--specdec-option": [], "--specdec-module": [], "--specdec-skip": []}
    return SimpleNamespace(getoption=(given | {f"--specdec-{name}": value for name, value in options.items()}).get)


def test_what_the_command_line_says() -> None:
    subject = test_proposer.TestProposer.subject(
        command_line(proposer="mine", option=["a=1", "b=x=y", "num_speculative_tokens=3"], module=["m"])
    )
    assert (subject.method, subject.modules, subject.num_speculative_tokens) == ("mine", ["m"], 3)
    assert subject.make_options(Path(), Path()) == {"a": 1, "b": "x=y"}
    with pytest.raises(pytest.UsageError, match="--specdec-proposer NAME"):
        test_proposer.TestProposer.subject(command_line())
    with pytest.raises(PluginError, match="--specdec-option 'a' has no '='"):
        test_proposer.TestProposer.subject(command_line(proposer="mine", option=["a"]))
    with pytest.raises(PluginError, match="--specdec-skip skips 'test_nothing', which is no kit test"):
        test_proposer.TestProposer.reasons_to_skip(command_line(skip=["test_nothing=it is late"]))


def test_options_of_the_kit_import_no_torch() -> None:
    code = "import sys, specdec_testing.pytest_plugin; print({'torch', 'numpy', 'hypothesis'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_tests_of_the_kit_are_not_overridden() -> None:
    def test_budgets(self, specdec_situations):
        pass

    with pytest.raises(PluginError, match=r"TestMine overrides test_budgets .* name it in `skips`"):
        type("TestMine", (ProposerConformance,), {"test_budgets": test_budgets})
    mixin = type("Mixin", (), {"test_budgets": None})
    with pytest.raises(PluginError, match="overrides test_budgets"):
        type("TestMine", (mixin, ProposerConformance), {})
    type("TestMine", (ProposerConformance,), {"test_of_my_own": test_budgets})
    for kit in (VerifierConformance, KVManagerConformance):
        name = kit.kit_tests()[0]
        with pytest.raises(PluginError, match=f"overrides {name}"):
            type("TestMine", (kit,), {name: test_budgets})


@pytest.mark.parametrize(
    ("options", "collected"),
    [
        ({}, ["test_proposer.py"]),
        ({"verifier": "mine"}, ["test_verifier.py"]),
        ({"kv-manager": "mine", "proposer": "mine"}, ["test_proposer.py", "test_kv_manager.py"]),
    ],
)
def test_what_is_named_is_checked(options: dict[str, str], collected: list[str]) -> None:
    folder = Path(test_proposer.__file__).parent
    config = command_line(**options)
    found = [name for name in pytest_plugin.CHECKED if not pytest_plugin.pytest_ignore_collect(folder / name, config)]
    assert found == collected
    assert pytest_plugin.pytest_ignore_collect(Path("test_verifier.py"), config) is None


@pytest.mark.parametrize(
    ("skips", "says"),
    [({"test_budget": "why not"}, "skips 'test_budget', which is no kit test"), ({"test_q": " "}, "without a reason")],
)
def test_skips_name_a_test_and_a_reason(skips: dict[str, str], says: str) -> None:
    with pytest.raises(PluginError, match=says):
        type("TestMine", (ProposerConformance,), {"skips": skips})


def test_what_is_reached() -> None:
    class Lender:
        def __init__(self) -> None:
            self.name = "the lender's"

        def method(self) -> None: ...

    lender = Lender()
    secret = "in a closure"
    root = SimpleNamespace(keys={"a": {"b"}, 1: ["c", ("d",)]}, call=lambda: secret, lender=lender)
    reach = HeldObjects.of(root, [lender.method])
    assert {"a", "b", "c", "d", "in a closure"} <= reach.strings
    assert "the lender's" not in reach.strings
    root.keys[2] = list(range(100))
    assert 100 <= HeldObjects.of(root, [lender.method]).size - reach.size < 110


def test_a_tiny_target_is_what_it_is_told_to_be(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    before = torch.random.get_rng_state()
    folders = [tiny_target(tmp_path / str(i), seed=seed, vocab_size=64) for i, seed in enumerate([0, 0, 1])]
    assert torch.equal(torch.random.get_rng_state(), before)
    one, same, other = [AutoModelForCausalLM.from_pretrained(folder).lm_head.weight for folder in folders]
    assert one.shape == (64, 32)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
