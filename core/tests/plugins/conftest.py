"""Fixtures that install temporary Python distributions: modules and package metadata in a folder on sys.path."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PROPOSER = """
from attrs import frozen
from specdec_core import ProposerSpec, hookimpl

@frozen
class Config:
    pass

def build(config, context):
    raise NotImplementedError

@hookimpl
def specdec_proposers():
    return [ProposerSpec(name="{name}", config=Config, build=build, api={api}{more})]
"""


class Site:
    """A folder like site-packages, into which tests install Python distributions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def install(
        self,
        distribution: str,
        entries: Mapping[str, str],
        modules: Mapping[str, str],
        version: str = "1.0",
        group: str = "specdec",
    ) -> None:
        """Install a distribution.

        entries: the value of each entry point by its name, all in the entry-point group `group`. modules: the source
        code of each module by its name.
        """
        info = f"{distribution.replace('-', '_')}-{version}.dist-info"
        files = {f"{module}.py": source for module, source in modules.items()}
        files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        lines = [f"{name} = {value}\n" for name, value in entries.items()]
        files[f"{info}/entry_points.txt"] = f"[{group}]\n" + "".join(lines)
        files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in files)
        (self.path / info).mkdir()
        for file, text in files.items():
            (self.path / file).write_text(text)
        importlib.invalidate_caches()

    def plugin(self, name: str, source: str, distribution: str | None = None, version: str = "1.0") -> str:
        """Install a distribution with one module, whose code is `source`, and one entry point for it. Returns the
        distribution's name."""
        distribution = distribution or f"dist-{name}"
        module = f"{distribution.replace('-', '_')}_module"
        self.install(distribution, {name: module}, {module: source}, version)
        return distribution

    def proposer(self, name: str, more: str = "", distribution: str | None = None, api: int = 1) -> str:
        """Install a working proposer plugin. Returns the distribution's name.

        more: further keyword arguments of its ProposerSpec, as source code.
        """
        return self.plugin(name, PROPOSER.format(name=name, more=more, api=api), distribution)

    def model(self, name: str, distribution: str, source: str | None = None) -> Path:
        """Install a distribution that ships a model. Returns an empty folder for the model's files.

        source: the code of the distribution's module, whose function `path` must return the folder. The default does.
        """
        module, folder = f"{distribution.replace('-', '_')}_module", self.path / f"{distribution}-weights"
        folder.mkdir()
        source = source or f"def path():\n    return {str(folder)!r}"
        self.install(distribution, {name: f"{module}:path"}, {module: source}, group="specdec.models")
        return folder

    def python(self, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run code in a new Python process with this folder on sys.path. Warnings are errors there."""
        path = os.pathsep.join(filter(None, [str(self.path), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, **environment}
        command = [sys.executable, "-W", "error", "-c", code]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A Site that is on this process's sys.path during one test."""
    monkeypatch.delenv("SPECDEC_DISABLE", raising=False)
    folder = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(folder.path)
    yield folder
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(folder.path)):
            del sys.modules[name]


@pytest.fixture
def second_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Site) -> Site:
    """A second Site, which comes after `site` on sys.path."""
    folder = Site(tmp_path / "second_site")
    monkeypatch.setattr(sys, "path", [sys.path[0], str(folder.path), *sys.path[1:]])
    return folder
