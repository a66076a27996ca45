"""The kernels compile for GPUs, which the interpreter does not show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""That a program may have on an A100 and an H100 (CUDA programming guide, compute capabilities)."""


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.nightly), 90])
def test_all_kernels_compile(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compile_all.py"), str(capability)],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [line.split() for line in done.stdout.splitlines()]
    names = {name for name, _ in sizes}
    assert names == {"_attend", "_add_parts", "_store", "_multiply", "_add_chunks", "_norm", "_rotate"}
    assert all(int(size) <= SHARED_BYTES[capability] for _, size in sizes)
