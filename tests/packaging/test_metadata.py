"""The metadata of the packages agree with each other, and the install commands in documents are right."""

from __future__ import annotations

import re
from itertools import chain

import pytest
from projects import FOLDERS, ROOT, files, name_of, pyproject

import specdec_core

PROJECTS = {**FOLDERS, "specdec": ROOT}
SHARED = ("readme", "requires-python", "license", "license-files")
"""Keys of [project] that have the same value in all packages."""

OWN = frozenset({"name", "version", "description", "classifiers", "keywords", "dependencies", "optional-dependencies",
                 "dynamic", "scripts", "entry-points"})  # fmt: skip
"""Keys of [project] that may differ. There are no others: addresses, for example, would have to be kept up to date."""

DOCUMENTS = [ROOT / name for name in files() if name.endswith(".md")]


@pytest.mark.parametrize("distribution", PROJECTS)
def test_metadata_agrees(distribution):
    core, this = pyproject(FOLDERS["specdec-core"]), pyproject(PROJECTS[distribution])
    assert this["build-system"] == core["build-system"]
    assert {key: this["project"].get(key) for key in SHARED} == {key: core["project"].get(key) for key in SHARED}
    assert this["project"].get("version", specdec_core.__version__) == specdec_core.__version__
    assert this["project"].keys() <= OWN | set(SHARED)
    shared = set(core["project"]["classifiers"])
    assert set(this["project"]["classifiers"]) == (
        shared if distribution != "specdec" else shared - {"Typing :: Typed"} | {"Private :: Do Not Upload"}
    )


def test_a_requirement_is_written_the_same_everywhere():
    written: dict[str, set[str]] = {}
    for folder in FOLDERS.values():
        project = pyproject(folder)["project"]
        for requirement in chain(project["dependencies"], *project.get("optional-dependencies", {}).values()):
            written.setdefault(name_of(requirement), set()).add(requirement)
    assert {name: found for name, found in written.items() if len(found) > 1} == {}
    major, minor, _ = specdec_core.__version__.split(".")
    for name in FOLDERS.keys() & written:
        assert written[name] == {f"{name}>={major}.{minor},<{major}.{int(minor) + 1}"}


@pytest.mark.parametrize("distribution", FOLDERS)
def test_the_license_is_there_once(distribution):
    """The LICENSE of each package is a symbolic link to the LICENSE in the repository's root.

    setuptools packs no file from outside a package's folder, but it follows symbolic links.
    """
    license_file = FOLDERS[distribution] / "LICENSE"
    assert license_file.is_symlink()
    assert license_file.resolve() == ROOT / "LICENSE"


def test_examples_of_a_pyproject_need_the_same_setuptools():
    (expected,) = pyproject(FOLDERS["specdec-core"])["build-system"]["requires"]
    found = [need for path in DOCUMENTS for need in re.findall(r'"(setuptools[^"\w.][^"]*)"', path.read_text())]
    assert found
    assert set(found) == {expected}


def test_documents_install_from_the_clone():
    """Documents install specdec's packages by path, not by name.

    The names are not registered on PyPI, so anyone could register one.
    """
    commands = [line for path in DOCUMENTS for line in re.findall(r"pip install ([^`\n]*)", path.read_text())]
    assert len(commands) > 5
    for command in commands:
        assert "specdec" not in command or "--no-index" in command, command
        for path in re.findall(r"(?<!\S)'?\./([\w/-]+)", command):
            assert (ROOT / path / "pyproject.toml").exists(), command
        if "./" in command:
            assert "./core" in command, command
