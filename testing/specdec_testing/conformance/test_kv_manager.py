"""Runs the conformance tests for the KV manager named by --specdec-kv-manager."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from specdec_testing.conformance.command_line import options_of, skips_of
from specdec_testing.conformance.kv_managers import KVManagerConformance, KVManagerSubject


class TestKVManager(KVManagerConformance):
    @classmethod
    def kv_manager_subject(cls, config: pytest.Config) -> KVManagerSubject:
        name = config.getoption("--specdec-kv-manager")
        return KVManagerSubject(name, config.getoption("--specdec-module"), options_of(config))

    @classmethod
    def reasons_to_skip(cls, config: pytest.Config) -> Mapping[str, str]:
        return skips_of(cls, config)
