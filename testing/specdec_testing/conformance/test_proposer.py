"""Runs the conformance tests for the proposer named by --specdec-proposer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from specdec_testing.conformance.command_line import options_of, skips_of
from specdec_testing.conformance.kit import ProposerConformance
from specdec_testing.conformance.subject import Subject


class TestProposer(ProposerConformance):
    @classmethod
    def subject(cls, config: pytest.Config) -> Subject:
        method = config.getoption("--specdec-proposer")
        if method is None:
            raise pytest.UsageError(
                "name what to check: --specdec-proposer NAME, --specdec-verifier NAME or --specdec-kv-manager NAME"
            )
        options = options_of(config)
        return Subject(
            method,
            config.getoption("--specdec-module"),
            int(options.pop("num_speculative_tokens", cls.num_speculative_tokens)),
            cls.make_target,
            lambda target, folder: options,
        )

    @classmethod
    def reasons_to_skip(cls, config: pytest.Config) -> Mapping[str, str]:
        return skips_of(cls, config)
