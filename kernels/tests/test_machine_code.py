"""`specdec_core.compiled` keeps machine code for all copies of a package, and functions called by address do what they
do when called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit, types

from specdec_kernels.cpu.calls import address_of, call_at

MODULE = """
from specdec_core import compiled
from copied.factor import FACTOR

@compiled({signature})
def scale(numbers):
    numbers[:] *= FACTOR
"""
ANNOUNCED = "compiling kernels for this processor"


def copy_of_package(folder: Path, factor: int, signature: str = "") -> Path:
    package = folder / "copied"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "factor.py").write_text(f"FACTOR = {factor}\n")
    (package / "module.py").write_text(MODULE.format(signature=signature))
    return folder


def scaled(folder: Path, cache: Path) -> tuple[float, str]:
    """Run the package's function in a process of its own. Returns its result and what the process wrote to stderr."""
    script = "import numpy as np; from copied.module import scale; x = np.ones(2); scale(x); print(x[0])"
    settings = {"PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | settings, capture_output=True, text=True, check=True
    )
    return float(done.stdout), done.stderr


@pytest.mark.parametrize("signature", ["", '"(f8[::1],)"'])
def test_copies_of_a_package_share_machine_code_until_any_file_changes(signature: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    result, said = scaled(copy_of_package(tmp_path / "first", 3, signature), cache)
    assert (result, said.count(ANNOUNCED)) == (3, 1)
    result, said = scaled(copy_of_package(tmp_path / "second", 3, signature), cache)
    assert (result, said.count(ANNOUNCED)) == (3, 0)
    result, said = scaled(copy_of_package(tmp_path / "third", 4, signature), cache)
    assert (result, said.count(ANNOUNCED)) == (4, 1)


def test_without_a_folder_for_it_each_process_compiles(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    package = copy_of_package(tmp_path / "first", 3)
    for _ in range(2):
        assert scaled(package, tmp_path / "cache")[0] == 3


@njit
def add(pair, numbers, total):
    for each in numbers:
        total[0] += pair[0] + pair[1] * each
    if total[0] > 100:
        raise ValueError("too large")


@njit
def add_at(function, pair, numbers, total):
    call_at(function, (pair, numbers, total))


KINDS = types.UniTuple(types.int64, 2), types.float64[::1], types.float64[::1]


def test_a_call_by_address_is_a_call() -> None:
    total = np.zeros(1)
    add_at(address_of(add, KINDS), (1, 2), np.arange(3.0), total)
    assert total[0] == 3 + 2 * 3


def test_an_exception_comes_through() -> None:
    with pytest.raises(ValueError, match="too large"):
        add_at(address_of(add, KINDS), (1000, 2), np.arange(3.0), np.zeros(1))
