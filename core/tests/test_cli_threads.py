"""How long threads spin, which `spec-decode` sets before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from specdec_core.cli import main
main(["plugins"], standalone_mode=False)
assert "torch" not in sys.modules
print("spins", os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_what_the_user_says_counts(given: dict[str, str], expected: str) -> None:
    known = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=known | given, capture_output=True, text=True, check=True)
    assert ran.stdout.endswith(f"spins {expected}\n")
