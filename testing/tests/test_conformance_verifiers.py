"""Tests of the conformance kit's checks of verifiers: each check fails for verifiers with the fault that it looks for,
and a sound verifier passes them all. conftest.py counts the expected failures as passed."""

from __future__ import annotations

import broken_verifiers
from attrs import evolve

from specdec_testing import VerifierConformance
from specdec_testing.conformance.shapes import PAIRS, SHAPES


class TestWalking(VerifierConformance):
    verifier = "walking"
    modules = ("broken_verifiers",)


WITHOUT_LIVE_NODES = {"nothing", "all dead", "a dead tree"}
PARAMETERS = {
    "test_output_has_the_targets_distribution": SHAPES.keys() - WITHOUT_LIVE_NODES,
    "test_joint_distribution": PAIRS.keys() - {"all dead beside a chain"},
}
"""Of tests with parameters, those with which they are to fail."""

for case in broken_verifiers.CASES:
    parameters = PARAMETERS.get(case.test, ())
    case = evolve(case, fails=tuple(f"{case.test}[{each}]" for each in parameters) or case.fails)
    name = f"TestBroken_{case.method}"
    attributes = {"__module__": __name__, "verifier": case.method, "modules": (case.module,), "case": case}
    globals()[name] = type(name, (VerifierConformance,), attributes)


def test_every_test_has_a_verifier_that_fails_it() -> None:
    assert {case.test for case in broken_verifiers.CASES} == set(VerifierConformance.kit_tests())
