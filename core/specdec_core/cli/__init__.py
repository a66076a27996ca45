"""The command `spec-decode`."""

from __future__ import annotations

import errno
import warnings
from importlib import import_module
from typing import Any

import click

import specdec_core
from specdec_core.errors import SpecdecError

COMMANDS = ("bench", "check", "demo", "generate", "plugins")
"""Modules of this package, each with a click command called `command`, which is the subcommand of the module's name."""

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class LazyGroup(click.Group):
    """Imports a command when it is asked for. `--help` imports them all, so none imports torch before it runs.

    Warnings and specdec's own errors are shown as one line of stderr each.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"{__name__}.{cmd_name}")
        assert isinstance(module.command, click.Command), f"{module.__name__}.command is what click runs"
        return module.command

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except SpecdecError as error:
                click.echo(f"error: {error}{self._hint(ctx, str(error))}", err=True)
                ctx.exit(1)
            except OSError as error:
                if error.errno == errno.EPIPE:
                    raise  # click ends quietly when nobody reads any more
                click.echo(f"error: {error}", err=True)
                ctx.exit(1)
            except KeyboardInterrupt:
                click.echo(err=True)
                ctx.exit(INTERRUPTED)

    def _hint(self, ctx: click.Context, message: str) -> str:
        """How the command line spells the keywords of `LLM` that an error mentions."""
        from specdec_core.cli.options import mentioned_keys

        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        own = {parameter.name for parameter in command.params} if command is not None else set()
        keys = sorted(mentioned_keys(message) - own)
        if "engine" not in own or not keys:
            return ""
        return "\nhint: here, " + ", ".join(f"--engine {key}=VALUE" for key in keys) + ", or in a --config FILE"


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"warning: {message}", err=True)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(specdec_core.__version__, prog_name="spec-decode")
def main() -> None:
    """Speculative decoding for PyTorch language models, where every way of drafting is a plugin."""
