"""Tests of the conformance kit's checks of KV managers: each check fails for managers with its fault.
conftest.py counts the expected failures as passed. The managers `paged` and `prefix` run the kit in their own tests."""

from __future__ import annotations

import broken_kv_managers

from specdec_testing import KVManagerConformance

for case in broken_kv_managers.CASES:
    name = f"TestBroken_{case.method}"
    attributes = {"__module__": __name__, "kv_manager": case.method, "modules": (case.module,), "case": case}
    globals()[name] = type(name, (KVManagerConformance,), attributes)


def test_every_test_has_a_kv_manager_that_fails_it() -> None:
    assert {case.test for case in broken_kv_managers.CASES} == set(KVManagerConformance.kit_tests())
