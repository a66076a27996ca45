"""The Triton kernels under the oldest version that the package declares, which `make setup` installs in a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1]
OLDEST = Path(sys.prefix, "oldest")
DAILY, NIGHTLY = (
    tuple(f"gpu/test_{name}.py" for name in names.split())
    for names in ("compaction elementwise likeliest truncation", "penalties residuals top_tokens verifiers")
)
BOTH = ("test_drawing.py",)
"""Of both devices."""
MORE = ("gpu/test_attention.py", "gpu/test_linear.py", "gpu/test_compiling.py")


@pytest.mark.skipif(not (OLDEST / "triton").exists(), reason="`make setup` has not installed it")
@pytest.mark.parametrize(
    "tests", [DAILY + BOTH, MORE, pytest.param(NIGHTLY, marks=pytest.mark.nightly)], ids=["small", "large", "more"]
)
def test_kernels_with_the_oldest_triton(tests: tuple[str, ...], tmp_path: Path) -> None:
    declared = re.search(r"triton>=([0-9.]+)", (KERNELS / "pyproject.toml").read_text(encoding="utf-8"))
    assert declared is not None
    folders = [str(OLDEST), str(KERNELS / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip().startswith(f"{declared[1]}."), "it would not be the oldest that is declared"
    files = [str(KERNELS / "tests" / each) for each in tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
