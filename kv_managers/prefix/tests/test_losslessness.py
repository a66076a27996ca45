"""Runs the parts of the losslessness suite with the most kinds of requests on this KV manager.

The whole suite: `SPECDEC_KV_MANAGER=prefix pytest tests/losslessness`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = ("test_greedy.py", "test_sampled.py", "test_engine_properties.py")


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_output_is_the_targets(part: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/losslessness/{part}"]
    env = {**os.environ, "SPECDEC_KV_MANAGER": "prefix"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
