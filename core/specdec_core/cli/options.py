"""What several commands share: speculation from the command line, and a model loaded without noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from specdec_core.llm import LLM

DEFAULT_NUM_SPECULATIVE_TOKENS = 5


class Setting(click.ParamType["tuple[str, Any]"]):
    """KEY=VALUE. The value is a YAML scalar: number, true, null or text. Anything else stays the text that it is."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        import yaml

        key, equals, text = value.partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is not KEY=VALUE: write it like prompt_lookup_max=4, without spaces", param, ctx)
        try:
            scalar = yaml.safe_load(text)
        except yaml.YAMLError:
            return key, text
        return key, scalar if scalar is None or isinstance(scalar, bool | int | float | str) else text


def speculative_config(
    method: str | None, settings: tuple[tuple[str, Any], ...], num_speculative_tokens: int | None
) -> dict[str, Any] | None:
    """What `LLM` takes as speculative_config; None without a method. Raises click.UsageError."""
    if method is None:
        given = [f"--set {key}" for key, _ in settings]
        given += ["--num-speculative-tokens"] if num_speculative_tokens is not None else []
        if given:
            raise click.UsageError(f"{', '.join(given)} says how to speculate: name a --method, too, or leave it out")
        return None
    config: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": num_speculative_tokens or DEFAULT_NUM_SPECULATIVE_TOKENS,
    }
    for key, value in settings:
        if key in config:
            option = f"as --{key.replace('_', '-')}" if key in ("method", "num_speculative_tokens") else "once"
            raise click.UsageError(f"--set {key}={value} is one too many: give {key} {option}")
        config[key] = value
    return config


def load(model: str, **options: Any) -> LLM:
    """An `LLM` with these options, and transformers' bars and warnings kept off the screen."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()

    from specdec_core.llm import LLM

    return LLM(model, **options)
