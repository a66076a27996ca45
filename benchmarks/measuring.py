"""What every benchmark records: the machine, the versions and the command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import specdec_core

RESULTS = Path(__file__).parent / "results"
OPENMP = ("GOMP_SPINCOUNT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
"""Variables that change how fast PyTorch's threads are."""
DISTRIBUTIONS = ("specdec-core", "specdec-kernels", "specdec-proposer-ngram")


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.machine()


def machine(distributions: tuple[str, ...] = DISTRIBUTIONS) -> dict[str, Any]:
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx": torch.cpu._is_amx_tile_supported(),
        **{name: os.environ[name] for name in OPENMP if name in os.environ},
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "transformers", "numba", *distributions)},
    }


def commit() -> str | None:
    """Return the checked out git commit, with "-dirty" if files were changed since; None outside of a git checkout."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or None


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution.

    For a distribution of specdec that is not installed, returns the version of specdec-core. Raises
    PackageNotFoundError if any other distribution is not installed.
    """
    try:
        return version(distribution)
    except PackageNotFoundError:
        if not distribution.startswith("specdec-"):
            raise
        return specdec_core.__version__


def command(script: str) -> str:
    """Return the command line of the running benchmark, as the results record it.

    script: the benchmark's file name.
    Absolute paths among the arguments become PATH/name, so that the results do not show this machine's folders.
    """
    return shlex.join(["python", f"benchmarks/{script}", *map(_without_folder, sys.argv[1:])])


def _without_folder(word: str) -> str:
    return f"PATH/{Path(word).name}" if Path(word).is_absolute() else word


def write(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
