"""Core's verifiers pass the conformance kit."""

from __future__ import annotations

from specdec_testing import VerifierConformance


class TestGreedy(VerifierConformance):
    verifier = "greedy"


class TestChosen(VerifierConformance):
    verifier = "chosen"


class TestRejection(VerifierConformance):
    verifier = "rejection"


class TestBlock(VerifierConformance):
    verifier = "block"


class TestTraversal(VerifierConformance):
    verifier = "traversal"


class TestTypical(VerifierConformance):
    verifier = "typical"
