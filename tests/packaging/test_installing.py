"""Tests of `pip install` for folders of the repository."""

from __future__ import annotations

import json

import pytest
from projects import FOLDERS, with_dependencies


def test_single_packages(environment, sources):
    environment.install("--no-build-isolation", "./core", "./proposers/eagle", cwd=sources)
    plugins = json.loads(environment.run(environment.bin / "spec-decode", "plugins", "--json"))
    assert {plugin["distribution"] for plugin in plugins} == with_dependencies(("specdec-proposer-eagle",))
    assert {plugin["status"] for plugin in plugins} == {"ok"}


@pytest.mark.nightly
def test_all_packages(environment, sources):
    """Installing the repository's root installs every package as a separate distribution. The distribution `specdec`
    itself holds only metadata."""
    environment.install("--no-build-isolation", ".", cwd=sources)
    listed = environment.run(environment.bin / "python", "-m", "pip", "list", "--format", "json")
    ours = {each["name"]: each["version"] for each in json.loads(listed) if each["name"].startswith("specdec")}
    assert ours.keys() == FOLDERS.keys() | {"specdec"}
    assert len(set(ours.values())) == 1
    owned = environment.run(environment.bin / "python", "-m", "pip", "show", "--files", "specdec").split("Files:")[1]
    assert all(".dist-info/" in file for file in owned.split())
    plugins = json.loads(environment.run(environment.bin / "spec-decode", "plugins", "--json"))
    assert {plugin["status"] for plugin in plugins} == {"ok"}
