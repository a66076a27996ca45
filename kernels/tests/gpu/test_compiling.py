"""The kernels compile for GPUs, which the interpreter does not show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""That a program may have on an A100 and an H100 (CUDA programming guide, compute capabilities)."""
MORE = [(80, 128), (90, 64), (90, 256)]


@pytest.mark.parametrize(
    ("capability", "head_dim"), [(90, 128), *(pytest.param(*each, marks=pytest.mark.nightly) for each in MORE)]
)
def test_all_kernels_compile(capability: int, head_dim: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compile_all.py"), str(capability), str(head_dim)],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (_, expected), *sizes = [line.split() for line in done.stdout.splitlines()]
    names = {name for name, _ in sizes}
    of_layers = {"_attend", "_add_parts", "_store", "_multiply", "_add_chunks", "_norm", "_rotate", "_place", "_gate"}
    outside = {"_sum_parts", "_pick", "_best_of_part", "_best_of_row", "_truncate", "_move", "_count", "_penalize"}
    outside |= {"_top_of_part", "_top_of_row"}
    of_verification = {"_weigh_parts", "_weigh_rows", "_sum_parts_of_q", "_add", "_ratios", "_rest_of_parts"}
    of_verification |= {"_finish", "_weights"}
    assert names == of_layers | outside | of_verification
    assert all(int(size) <= SHARED_BYTES[capability] for _, size in sizes)
    assert all(int(size) <= int(expected) for name, size in sizes if name == "_attend")
