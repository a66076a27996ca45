"""Fixtures that build the wheels of the packages, and virtual environments in which to install them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests

from isolated import Environment, link_third_party
from projects import ROOT, files

COMMIT = {
    **{f"GIT_{who}_{what}": "tests@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    **dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2020-02-02T12:00:00Z"),
}


def run(*command: str, cwd: Path) -> None:
    """Run a command and assert that it succeeds.

    Environment variables that an outer make or git has set are not passed on.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "MAKE", "MFLAGS", "SOURCE_"))}
    result = subprocess.run(command, cwd=cwd, env=env | COMMIT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"


@pytest.fixture(scope="session")
def copy_sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a function that copies the repository's files, with uncommitted changes, into a new git repository, and
    returns its folder.

    setuptools writes files beside the sources that it builds, so builds run in such a copy.
    """

    def copy() -> Path:
        folder = tmp_path_factory.mktemp("sources")
        for name in files():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
        run("git", "init", "--quiet", cwd=folder)
        run("git", "commit", "--quiet", "--allow-empty", "--no-gpg-sign", "--message", "Its time counts", cwd=folder)
        return folder

    return copy


@pytest.fixture(scope="session")
def make_wheels() -> Callable[..., Path]:
    """Return a function that runs `make wheels` in a folder of sources and returns the folder with the wheels.

    The function takes the folder and variables for make. It builds with the Python that runs the tests, not with .venv.
    """

    def make(sources: Path, **variables: str) -> Path:
        given = [f"{key}={value}" for key, value in {"BIN": str(Path(sys.executable).parent), **variables}.items()]
        run("make", "--old-file=setup", "wheels", *given, cwd=sources)
        return sources / "dist"

    return make


@pytest.fixture(scope="session")
def sources(copy_sources: Callable[[], Path]) -> Path:
    return copy_sources()


@pytest.fixture(scope="session")
def wheels(sources: Path, make_wheels: Callable[..., Path]) -> Path:
    return make_wheels(sources)


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_third_party(tmp_path_factory.mktemp("third_party"))


@pytest.fixture
def environment(tmp_path: Path, third_party: Path) -> Environment:
    return Environment(tmp_path / "environment", third_party)
