"""Runs the conformance tests for the proposer named by --specdec-proposer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml

from specdec_core.errors import PluginError
from specdec_testing.conformance.kit import ProposerConformance, check_skips
from specdec_testing.conformance.subject import Subject


class TestProposer(ProposerConformance):
    @classmethod
    def subject(cls, config: pytest.Config) -> Subject:
        method = config.getoption("--specdec-proposer")
        if method is None:
            raise pytest.UsageError("name the method to check: --specdec-proposer NAME")
        options = {key: yaml.safe_load(value) for key, value in _pairs(config, "--specdec-option").items()}
        return Subject(
            method,
            config.getoption("--specdec-module"),
            int(options.pop("num_speculative_tokens", cls.num_speculative_tokens)),
            cls.make_target,
            lambda target, folder: options,
        )

    @classmethod
    def reasons_to_skip(cls, config: pytest.Config) -> Mapping[str, str]:
        skips = _pairs(config, "--specdec-skip")
        check_skips(skips, "--specdec-skip")
        return skips


def _pairs(config: pytest.Config, option: str) -> dict[str, Any]:
    given: Sequence[str] = config.getoption(option)
    pairs = [text.partition("=") for text in given]
    for text, (key, equals, _) in zip(given, pairs, strict=True):
        if not key or not equals:
            raise PluginError(f"{option} {text!r} has no '=': write it like {option} name=value")
    return {key: value for key, _, value in pairs}
