"""The command line `spec-decode`."""

from __future__ import annotations

import errno
import os
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

import specdec_core
from specdec_core.cli.screen import printable
from specdec_core.errors import NoDraftError, SpecdecError, did_you_mean

if TYPE_CHECKING:
    from specdec_core.plugins import Plugins

COMMANDS = ("check", "generate", "plugins", "warmup")
"""Modules of this package, each with a click command called `command`, which is the subcommand of the module's name."""

INTERRUPTED = 130  # 128 + SIGINT, as shells report it

SPIN_COUNT = 10_000
"""How often a thread of GNU OpenMP looks for new work before it sleeps, unless the user says it. By default it looks 30
times as often, and where another process needs the core, the other threads wait for it all that time
(kernels/README.md)."""


class LazyGroup(click.Group):
    """A click group that imports a command only when it is used. `--help` imports all commands, so a command's module
    must not import torch; the command may do so when it runs.

    The group loads plugins only to find a command that specdec_core does not have, or to list all commands.
    Warnings and specdec's own errors are printed to stderr in one line each.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        added = _plugins(ctx).commands(COMMANDS)
        for fault in added.faults:
            _show_warning(str(fault.error))
        return [*COMMANDS, *sorted(added.usable)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return _plugins(ctx).command(cmd_name, COMMANDS)
        module = import_module(f"{__name__}.{cmd_name}")
        assert isinstance(module.command, click.Command), f"{module.__name__}.command is what click runs"
        return module.command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            known = self.list_commands(ctx)
            ctx.fail(f"No such command {name!r}.{did_you_mean(name, known)} The commands are {', '.join(known)}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except click.UsageError as error:
                message = error.format_message()
                if printable(message) == message:
                    raise
                raise click.UsageError(printable(message), error.ctx) from error
            except SpecdecError as error:
                click.echo(printable(f"error: {error}{self._hint(ctx, error)}"), err=True)
                ctx.exit(1)
            except OSError as error:
                if error.errno == errno.EPIPE:
                    raise  # click exits quietly when the reader of a pipe is gone
                click.echo(printable(f"error: {error}"), err=True)
                ctx.exit(1)
            except KeyboardInterrupt:
                click.echo("\ninterrupted", err=True)
                ctx.exit(INTERRUPTED)

    def _hint(self, ctx: click.Context, error: SpecdecError) -> str:
        """A hint for an error that mentions keywords of `LLM`, or says that a draft is missing: how to give
        them on the command line. "" for other errors."""
        from specdec_core.cli.options import mentioned_keys

        name = ctx.invoked_subcommand
        command = self.get_command(ctx, name) if name is not None else None
        own = {parameter.name for parameter in command.params} if command is not None else set()
        options = [f"--engine {key}=VALUE" for key in sorted(mentioned_keys(str(error)) - own)]
        if isinstance(error, NoDraftError):
            options.insert(0, "--set model=FOLDER")
        if "engine" not in own or not options:
            return ""
        return f"\nhint: here, {', '.join(options)}, or in a --config FILE"


def _plugins(ctx: click.Context) -> Plugins:
    """The installed plugins. They are loaded at the first call and kept in click's context."""
    if __name__ not in ctx.meta:
        from specdec_core.plugins import Plugins

        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # `--help` is printed before `invoke`
            ctx.meta[__name__] = Plugins.load()
    plugins: Plugins = ctx.meta[__name__]
    return plugins


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(printable(f"warning: {message}"), err=True)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(specdec_core.__version__, prog_name="spec-decode")
def main() -> None:
    """Speculative decoding for PyTorch language models, where every way of drafting is a plugin."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))  # read when torch is imported, which is later
