"""docs/conformance.md has a row for each check of the kit, with an example that breaks it."""

from __future__ import annotations

import re
from pathlib import Path

import broken_kv_managers
import broken_proposers
import broken_verifiers
import pytest

from specdec_testing import KVManagerConformance, ProposerConformance, VerifierConformance

DOCUMENT = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")
KITS = {
    "Proposers": (ProposerConformance, broken_proposers.CASES),
    "Verifiers": (VerifierConformance, broken_verifiers.CASES),
    "KV managers": (KVManagerConformance, broken_kv_managers.CASES),
}


@pytest.mark.parametrize("title", KITS)
def test_each_check_has_a_row(title):
    kit, cases = KITS[title]
    section = DOCUMENT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(test_\w+)` \| .+ \| `(\w+)` \|$", section, flags=re.MULTILINE)
    assert sorted(test for test, _ in rows) == sorted(kit.kit_tests())
    broken = {(case.test, case.method) for case in cases}
    assert [row for row in rows if row not in broken] == []
