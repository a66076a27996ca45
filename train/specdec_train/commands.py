"""`spec-decode train METHOD`: a command for each installed method with a training recipe, with the recipe's options."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec_core import PluginError, ProposerSpec
from specdec_train.settings import Settings, help_of

if TYPE_CHECKING:
    from specdec_core import Plugins

PLAIN = (int, float, str, Path, bool)


class Methods(click.Group):
    """A click command group with one command per method that has a training recipe."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        plugins = _plugins(ctx)
        return [name for name in plugins.proposers() if _recipe(plugins, name) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        spec = _recipe(_plugins(ctx), cmd_name)
        return None if spec is None else command_of(spec)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            why, known = "", ", ".join(self.list_commands(ctx)) or "none that is installed"
            try:
                _plugins(ctx).proposer(args[0])
            except PluginError as error:
                why = f" {error}"
            ctx.fail(f"{args[0]!r} is not a method with a training recipe.{why} Methods with one: {known}.")
        return super().resolve_command(ctx, args)


@click.command(cls=Methods, name="train")
def train() -> None:
    """Train a draft model or draft head for a target model.

    Checkpoints have the usual published layout, so other engines load them too. --resume continues a killed run from
    its last save.
    """


def command_of(spec: ProposerSpec) -> click.Command:
    """Return the command that trains a method. Its options are those of every training run and those of the method's
    recipe.

    Raises PluginError if an option of the recipe has the same name as an option of every run.
    """
    assert spec.train is not None
    own = {attribute.name for attribute in attrs.fields(spec.train.options)}
    taken = sorted(own & {attribute.name for attribute in attrs.fields(Settings)})
    if taken:
        raise PluginError(
            f"the training recipe of {spec.name!r} has the options {', '.join(taken)}, which every run has: its plugin "
            f"must rename them"
        )
    common = [_option(Settings, attribute) for attribute in attrs.fields(Settings)]
    special = [_option(spec.train.options, attribute) for attribute in attrs.fields(spec.train.options)]

    def run(**values: Any) -> None:
        assert spec.train is not None
        options = spec.train.options(**{name: value for name, value in values.items() if name in own})
        settings = Settings(**{name: value for name, value in values.items() if name not in own})
        from specdec_train.run import train as run_it

        run_it(spec, settings, options)

    return click.Command(
        spec.name, callback=run, params=[*common, *special], help=f"Train a draft for the method {spec.name}."
    )


def _option(owner: type, attribute: attrs.Attribute[Any]) -> click.Option:
    name = attribute.name.replace("_", "-")
    kind, is_many = _kind(typing.get_type_hints(owner)[attribute.name])
    is_required = attribute.default is attrs.NOTHING
    given: dict[str, Any] = {"help": help_of(attribute), "required": is_required}
    if not is_required:
        given |= {"default": attribute.default, "show_default": attribute.default not in (None, ())}
    if kind is bool:
        both = f"--{name}" if attribute.default is False else f"--{name}/--no-{name}"
        return click.Option([both, attribute.name], is_flag=True, **given)
    is_path = kind is Path
    return click.Option(
        [f"--{name}", attribute.name], type=click.Path(path_type=Path) if is_path else kind, multiple=is_many, **given
    )


def _kind(hint: Any) -> tuple[Any, bool]:
    """Return click's type for an option's type annotation, and whether the option can be given several times. Only a
    tuple of paths can; other tuples are read as text."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return (Path, True) if inner is Path else (str, False)
    return (hint if hint in PLAIN else str), False


def _recipe(plugins: Plugins, name: str) -> ProposerSpec | None:
    try:
        spec = plugins.proposer(name)
    except PluginError:
        return None
    return spec if spec.train is not None else None


def _plugins(ctx: click.Context) -> Plugins:
    """Return the installed plugins. They are loaded once per command line and cached in click's context."""
    root = ctx.find_root()
    if __name__ not in root.meta:
        from specdec_core import Plugins

        root.meta[__name__] = Plugins.load()
    found: Plugins = root.meta[__name__]
    return found
