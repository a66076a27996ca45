"""Runs the conformance tests for the KV manager named by --specdec-kv-manager."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from specdec_testing.conformance.base import NamedSubject
from specdec_testing.conformance.command_line import skips_of, subject_of
from specdec_testing.conformance.kv_managers import KVManagerConformance


class TestKVManager(KVManagerConformance):
    @classmethod
    def kv_manager_subject(cls, config: pytest.Config) -> NamedSubject:
        return subject_of(config, "--specdec-kv-manager")

    @classmethod
    def reasons_to_skip(cls, config: pytest.Config) -> Mapping[str, str]:
        return skips_of(cls, config)
