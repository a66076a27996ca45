"""Runs the conformance tests for the verifier named by --specdec-verifier."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from specdec_testing.conformance.command_line import options_of, skips_of
from specdec_testing.conformance.verifiers import VerifierConformance, VerifierSubject


class TestVerifier(VerifierConformance):
    @classmethod
    def verifier_subject(cls, config: pytest.Config) -> VerifierSubject:
        name = config.getoption("--specdec-verifier")
        return VerifierSubject(name, config.getoption("--specdec-module"), options_of(config))

    @classmethod
    def reasons_to_skip(cls, config: pytest.Config) -> Mapping[str, str]:
        return skips_of(cls, config)
