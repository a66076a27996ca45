"""The command `spec-decode`."""

from __future__ import annotations

import warnings
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import click

import specdec_core
from specdec_core.errors import SpecdecError


class LazyGroup(click.Group):
    """Every module of this package is the subcommand of its name: a click command called `command`.

    It is imported when it is asked for. `--help` imports them all, so none imports torch before its command runs.
    Warnings and specdec's own errors are shown as one line of stderr each.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(module.name.replace("_", "-") for module in iter_modules(__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"{__name__}.{cmd_name.replace('-', '_')}")
        assert isinstance(module.command, click.Command), f"{module.__name__}.command is what click runs"
        return module.command

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except SpecdecError as error:
                click.echo(f"error: {error}", err=True)
                ctx.exit(1)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"warning: {message}", err=True)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(specdec_core.__version__, prog_name="spec-decode")
def main() -> None:
    """Speculative decoding for PyTorch language models, where every way of drafting is a plugin."""
