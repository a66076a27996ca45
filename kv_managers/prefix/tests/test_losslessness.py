"""Runs three test files of tests/losslessness with the KV manager `prefix`. They check that the engine's outputs equal
the target's own.

By default they run on one target model, nightly on all. `SPECDEC_KV_MANAGER=prefix pytest tests/losslessness` runs the
whole suite with this KV manager.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = [f"tests/losslessness/{name}.py" for name in ("test_greedy", "test_sampled", "test_engine_properties")]
OTHER_TARGETS = "qwen3 or embedded"


@pytest.mark.parametrize("targets", [f"not ({OTHER_TARGETS})", pytest.param(OTHER_TARGETS, marks=pytest.mark.nightly)])
def test_output_is_the_targets(targets: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", targets, *PARTS]
    env = {**os.environ, "SPECDEC_KV_MANAGER": "prefix"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
