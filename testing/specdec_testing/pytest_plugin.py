"""The pytest plugin of the conformance kit. It adds command-line options and fixtures, and skips the tests that a
conformance class names in `skips`.

pytest imports this module at every start, through an entry point, so it imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from specdec_testing.conformance.situations import Situations
    from specdec_testing.conformance.targets import Targets

pytest.register_assert_rewrite("specdec_testing.conformance")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("specdec", "specdec's conformance kit (specdec_testing.conformance)")
    group.addoption("--specdec-proposer", metavar="NAME", help="the method to check")
    repeated = {"action": "append", "default": []}
    group.addoption("--specdec-option", **repeated, metavar="KEY=VALUE", help="an option of the method (repeatable)")
    group.addoption(
        "--specdec-module",
        **repeated,
        metavar="MODULE",
        help="a module with a plugin that is not installed (repeatable)",
    )
    group.addoption(
        "--specdec-skip", **repeated, metavar="TEST=REASON", help="a check that does not apply, and why (repeatable)"
    )


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
) -> Situations:
    """Engine runs with the proposer that a conformance class checks. The tests of that class share them."""
    from specdec_testing.conformance.situations import Situations

    subject = request.cls.subject(request.config)
    return Situations(subject, specdec_targets.of(subject), tmp_path_factory.mktemp("draft"))
