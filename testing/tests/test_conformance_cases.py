"""Tests of the conformance kit's checks: each check fails for proposers with the fault that it looks for, and passes
for all other proposers. conftest.py counts the expected failures as passed."""

from __future__ import annotations

from types import MappingProxyType

import broken_proposers

from specdec_testing import ProposerConformance


class TestRecent(ProposerConformance):
    method = "recent"
    options = MappingProxyType({"recent_max_chain": 4})
    modules = ("example_proposer",)


GOOD = ("branching", "sampling", "fading", "selecting", "feeling", "addressing", "attending")
for method in GOOD:
    name = f"Test{method.title()}"
    attributes = {"__module__": __name__, "method": method, "modules": ("good_proposers",)}
    globals()[name] = type(name, (ProposerConformance,), attributes)

for case in broken_proposers.CASES:
    name = f"TestBroken_{case.method}"
    attributes = {
        "__module__": __name__,
        "method": case.method,
        "options": case.options,
        "modules": (case.module,),
        "case": case,
    }
    globals()[name] = type(name, (ProposerConformance,), attributes)


def test_every_test_has_a_proposer_that_fails_it() -> None:
    shown = {case.test for case in broken_proposers.CASES if not case.is_variant}
    assert shown == set(ProposerConformance.kit_tests())
