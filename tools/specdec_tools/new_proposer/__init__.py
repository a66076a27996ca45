"""spec-decode new-proposer: writes the package of a new drafting method, of which the author replaces one function."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from string import Template

import click

from specdec_core.errors import ConfigError
from specdec_core.plugins import Plugins

FILES = {
    "pyproject.toml": "pyproject.toml",
    "$module.py": "module.py",
    "tests/test_$name.py": "test.py",
    "README.md": "README.md",
    ".github/workflows/test.yml": "workflow.yml",
}
"""Each file of the package, and the template of it beside this module."""

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@click.command("new-proposer")
@click.argument("name")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="The folder to create.  [default: specdec-proposer-NAME, in the current one]",
)
def command(name: str, folder: Path | None) -> None:
    """Write a package with the new drafting method NAME.

    It can be installed, drafts, and passes the conformance kit. To make it a method of your own, replace the function
    `continuation`. Files that exist are never overwritten.
    """
    _check(name)
    values = {"name": name, "module": _module(name), "title": name.title().replace("_", ""), "dist": _dist(name)}
    folder = folder or Path(values["dist"])
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{str(folder)!r} exists already: remove it, or name another with --folder") from None
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be created: {error.strerror}") from error
    for path, template in FILES.items():
        target = folder / Template(path).substitute(values)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = files(__name__).joinpath(f"{template}.template").read_text(encoding="utf-8")
        target.write_text(Template(text).substitute(values), encoding="utf-8")
    click.echo(
        f"{folder} has the method {name!r}. Replace the function continuation in {values['module']}.py. To try it:\n\n"
        f"  pip install --no-deps --no-build-isolation -e {folder}\n"
        f"  spec-decode generate --method {name} 'one two three one two'\n"
        f"  python -m pytest {folder}"
    )


def _check(name: str) -> None:
    """Raise ConfigError if a new method cannot have this name."""
    if not NAME.fullmatch(name) or iskeyword(name):
        raise ConfigError(
            f"{name!r} is no name for a method: give lower-case letters, digits and single underscores, a letter first "
            f"and no underscore last, and no keyword of Python"
        )
    for taken, by in _taken():
        if name == taken:
            raise ConfigError(f"the name {name!r} is taken by {by}, which is installed: choose another")
    if find_spec(_module(name)) is not None:
        raise ConfigError(f"a module {_module(name)} is installed already: choose another name than {name!r}")


def _taken() -> Iterator[tuple[str, str]]:
    """Yield the names that installed plugins have or offer, each with the plugin's distribution."""
    plugins = Plugins.load()
    for info in plugins.listing():
        yield info.name, info.distribution
    for plugin in plugins.usable:
        for spec in plugin.specs:
            yield from ((name, plugin.distribution) for name in (spec.name, *getattr(spec, "aliases", ())))


def _module(name: str) -> str:
    return f"specdec_proposer_{name}"


def _dist(name: str) -> str:
    return f"specdec-proposer-{name.replace('_', '-')}"
