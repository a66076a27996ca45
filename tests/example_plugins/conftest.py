"""The plugins in examples/plugins, installed in a temporary folder, and a tiny random target."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests

from packages import EXAMPLES, module_of

from specdec_testing import tiny_target


@pytest.fixture(scope="session")
def site_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the examples in a folder of their own, and return it."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
           "--no-build-isolation", "--no-compile", "--target", str(folder)]  # fmt: skip
    copies = tmp_path_factory.mktemp("sources")  # setuptools leaves files beside what it builds
    for example in EXAMPLES:
        copy = copies / example.name
        copy.mkdir()
        for path in example.iterdir():
            if path.is_file():
                (copy / path.name).write_bytes(path.read_bytes())
    done = subprocess.run([*pip, *map(str, sorted(copies.iterdir()))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module", autouse=True)
def installed(site_folder: Path) -> Iterator[None]:
    """Let this process find the examples until the tests of a file have run."""
    sys.path.insert(0, str(site_folder))
    yield
    sys.path.remove(str(site_folder))
    for example in EXAMPLES:
        sys.modules.pop(module_of(example), None)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))
