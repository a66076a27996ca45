"""Runs tests of tests/losslessness with the KV manager `prefix`. They check that the engine's outputs equal the
target's own.

By default they run with one proposer on one target model, nightly with all of both, and with more ways of sampling.
`SPECDEC_KV_MANAGER=prefix pytest tests/losslessness` runs the whole suite with this KV manager.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OTHER_TARGETS = "qwen3 or embedded"
RUNS = [
    (("test_engine_properties",), "random_tree", ()),
    (("test_engine_properties",), f"not ({OTHER_TARGETS}) and not random_tree", pytest.mark.nightly),
    (("test_greedy", "test_sampled"), f"not ({OTHER_TARGETS})", pytest.mark.nightly),
    (("test_greedy", "test_sampled", "test_engine_properties"), OTHER_TARGETS, pytest.mark.nightly),
]


@pytest.mark.parametrize(("names", "targets"), [pytest.param(*run[:2], marks=run[2]) for run in RUNS])
def test_output_is_the_targets(names: tuple[str, ...], targets: str) -> None:
    files = [f"tests/losslessness/{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", targets, *files]
    env = {**os.environ, "SPECDEC_KV_MANAGER": "prefix"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
