"""spec-decode new-proposer: what it writes is installed, listed, drafts and passes the conformance kit, and what it
refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specdec_core.cli import main

INSTALL = ("pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
DRAFT = "from specdec_testing import propose; print(propose('first_try', [[7, 8, 9, 1, 7]], num_speculative_tokens=3))"


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["new-proposer", *arguments])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "package"
    result = invoke("first_try", "--folder", str(folder))
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def python(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that runs Python where the new package is installed, and returns what it prints."""
    site = tmp_path_factory.mktemp("site")
    env = {**os.environ, "PYTHONPATH": str(site)}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        result = subprocess.run(command, cwd=package, env=env, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    run("-m", *INSTALL, "--target", str(site), ".")
    return run


def test_the_files_of_the_package(package: Path) -> None:
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    package_files = {"pyproject.toml", "README.md", "specdec_proposer_first_try.py", "tests/test_first_try.py"}
    assert files >= {*package_files, ".github/workflows/test.yml"}
    assert not [name for name in files if "$" in (package / name).read_text(encoding="utf-8", errors="ignore")]


def test_it_is_tidy(package: Path) -> None:
    for check in (["check"], ["format", "--check"]):
        settings = ("--config", str(Path(__file__).parents[2] / "pyproject.toml"), "--no-cache")
        command = [sys.executable, "-m", "ruff", *check, *settings, str(package)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout


def test_it_is_listed(python: Callable[..., str]) -> None:
    (plugin,) = json.loads(python("-m", "specdec_core", "plugins", "first_try", "--json"))
    found = plugin["distribution"], plugin["status"], plugin["provides"]
    assert found == ("specdec-proposer-first-try", "ok", ["proposer first_try"])


def test_it_drafts(python: Callable[..., str]) -> None:
    assert "token_ids=[8, 9, 1]" in python("-c", DRAFT)


def test_it_passes_the_conformance_kit(python: Callable[..., str]) -> None:
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert " passed" in said
    assert "failed" not in said


@pytest.mark.parametrize("name", ["Recent", "2fast", "a-b", "a.b", "_a", "a__b", "a_", "class", "é", ""])
def test_names_that_are_refused(name: str, tmp_path: Path) -> None:
    result = invoke("--folder", str(tmp_path / "package"), "--", name)
    assert result.exit_code == 1
    assert f"{name!r} is no name for a method" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["greedy", "ngram", "paged", "tiny"])
def test_names_that_are_taken(name: str, tmp_path: Path) -> None:
    result = invoke(name, "--folder", str(tmp_path / "package"))
    assert result.exit_code == 1
    assert f"the name {name!r} is taken by specdec-" in result.output
    assert not list(tmp_path.iterdir())


def test_a_module_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "specdec_proposer_mine.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    result = invoke("mine", "--folder", str(tmp_path / "package"))
    assert "a module specdec_proposer_mine is installed already" in result.output
    assert result.exit_code == 1


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("mine").exit_code == 0
    readme = tmp_path / "specdec-proposer-mine" / "README.md"
    readme.write_text("my own")
    result = invoke("mine")
    assert result.exit_code == 1
    assert "'specdec-proposer-mine' exists already" in result.output
    assert readme.read_text() == "my own"


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = invoke("mine", "--folder", str(tmp_path / "file" / "package"))
    assert result.exit_code == 1
    assert "cannot be created: Not a directory" in result.output
