"""The pytest plugin of the conformance kit. It adds command-line options and fixtures, and skips the tests that a
conformance class names in `skips`.

pytest imports this module at every start, through an entry point, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from specdec_testing.conformance.kv_managers import CheckedKVManager
    from specdec_testing.conformance.situations import Situations
    from specdec_testing.conformance.targets import Targets
    from specdec_testing.conformance.verifiers import CheckedVerifier

CHECKED = {
    "test_proposer.py": "--specdec-proposer",
    "test_verifier.py": "--specdec-verifier",
    "test_kv_manager.py": "--specdec-kv-manager",
}
"""The kit's test files, and the option that names the plugin which each one checks."""

COSTS = pytest.StashKey[list[str]]()

pytest.register_assert_rewrite("specdec_testing.conformance")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("specdec", "specdec's conformance kit (specdec_testing.conformance)")
    group.addoption("--specdec-proposer", metavar="NAME", help="the method to check")
    group.addoption("--specdec-verifier", metavar="NAME", help="the verifier to check")
    group.addoption("--specdec-kv-manager", metavar="NAME", help="the KV manager to check")
    repeated = {"action": "append", "default": []}
    group.addoption("--specdec-option", **repeated, metavar="KEY=VALUE", help="an option of the plugin (repeatable)")
    group.addoption(
        "--specdec-module",
        **repeated,
        metavar="MODULE",
        help="a module with a plugin that is not installed (repeatable)",
    )
    group.addoption(
        "--specdec-skip", **repeated, metavar="TEST=REASON", help="a check that does not apply, and why (repeatable)"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the kit's own test files, collect those whose option is given, and test_proposer.py, which asks for one, if
    none is."""
    if collection_path.parent != Path(__file__).parent / "conformance" or collection_path.name not in CHECKED:
        return None
    asked = [name for name, option in CHECKED.items() if config.getoption(option)]
    return True if collection_path.name not in (asked or ["test_proposer.py"]) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    kit_class = getattr(item, "cls", None)
    if kit_class is not None and hasattr(kit_class, "reasons_to_skip"):
        reason = kit_class.reasons_to_skip(item.config).get(getattr(item, "originalname", item.name))
        if reason:
            pytest.skip(reason)


@pytest.fixture(scope="session")
def specdec_targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """The target models with random weights, which all conformance classes of the test session share."""
    from specdec_testing.conformance.targets import Targets

    return Targets(tmp_path_factory)


@pytest.fixture(scope="class")
def specdec_situations(
    request: pytest.FixtureRequest, specdec_targets: Targets, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Situations]:
    """Engine runs with the proposer that a conformance class checks. The tests of that class share them."""
    from specdec_testing.conformance.situations import Situations

    subject = request.cls.subject(request.config)
    situations = Situations(subject, specdec_targets.of(subject), tmp_path_factory.mktemp("draft"))
    yield situations
    if situations.costs:
        request.config.stash.setdefault(COSTS, []).append(situations.costs)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the checked proposers' calls cost. No test depends on it."""
    if lines := config.stash.get(COSTS, []):
        terminalreporter.section("median time of a proposer's calls")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="class")
def specdec_verifier(request: pytest.FixtureRequest) -> CheckedVerifier:
    """The verifier that a conformance class checks."""
    from specdec_testing.conformance.verifiers import CheckedVerifier

    return CheckedVerifier(request.cls.verifier_subject(request.config))


@pytest.fixture(scope="class")
def specdec_kv_manager(request: pytest.FixtureRequest) -> CheckedKVManager:
    """The KV manager that a conformance class checks."""
    from specdec_testing.conformance.kv_managers import CheckedKVManager

    return CheckedKVManager(request.cls.kv_manager_subject(request.config))
