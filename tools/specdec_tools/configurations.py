"""The configurations that `spec-decode bench` compares with plain decoding, and what was run, in words."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import click
from attrs import frozen

from specdec_core.cli.options import ModelOptions
from specdec_core.config.fields import shown
from specdec_core.config.sampling import SamplingParams
from specdec_core.errors import ConfigError
from specdec_tools import synthetic
from specdec_tools.compare import TimedModel


@frozen
class Configuration:
    """A way to speculate that is measured against plain decoding.

    name: unique among those of a run.
    is_synthetic: whether drafts are made from the known output and accepted at given rates.
    """

    name: str
    options: ModelOptions
    is_synthetic: bool = False

    @property
    def method(self) -> str:
        """The name of the method, or of several as in "suffix + eagle3"."""
        given = (self.options.speculative_config or {}).get("method", "speculation")
        entries = given if isinstance(given, list) else [given]
        return " + ".join(str(each.get("method") if isinstance(each, Mapping) else each) for each in entries)

    def load(self) -> TimedModel:
        return TimedModel.load(self.options, is_synthetic=self.is_synthetic)


def configurations(given: Sequence[ModelOptions], rates: Sequence[float]) -> list[Configuration]:
    """Return the given configurations and, with synthetic acceptance rates, one more of these. Raises ConfigError if
    they do not share a plain run, because they differ in more than speculation.

    given: one for each config file. The first one's model and engine are those of the synthetic configuration.
    rates: see `synthetic.SyntheticConfig`; empty: there is no synthetic configuration.
    """
    for options in given[1:]:
        _check_engine(given[0], options)
    names = _names(given)
    found = [Configuration(name, options) for name, options in zip(names, given, strict=True)]
    if rates:
        synthetic.SyntheticConfig(list(rates))  # refuses wrong rates now
        config = {
            "method": synthetic.METHOD,
            "num_speculative_tokens": len(rates),
            "synthetic_acceptance_rates": list(rates),
        }
        found.append(Configuration(synthetic.METHOD, given[0].with_keywords(speculative_config=config), True))
    return found


def _names(given: Sequence[ModelOptions]) -> list[str]:
    """Name configurations by their methods and, where these are not unique, by their files, too. Raises ConfigError if
    a file is given twice."""
    methods = [Configuration("", options).method for options in given]
    if len(given) == 1:
        return methods
    files = [options.file for options in given if options.file is not None]
    for file in files:
        if files.count(file) > 1:
            raise ConfigError(f"--config {str(file)!r} is given twice: give each file once")
    short = [file.name for file in files]
    shown_files = short if len({*short}) == len(short) else [str(file) for file in files]
    return [
        method if methods.count(method) == 1 else f"{method} ({file})"
        for method, file in zip(methods, shown_files, strict=True)
    ]


def _check_engine(first: ModelOptions, other: ModelOptions) -> None:
    for key in sorted({*first.keywords, *other.keywords} - {"speculative_config"}):
        one, two = first.keywords.get(key), other.keywords.get(key)
        if one != two:
            raise ConfigError(
                f"--config {str(other.file)!r} has {key}={shown(two)}, but {str(first.file)!r} has {shown(one)}: files "
                f"that are compared with the same plain run may differ in speculative_config only"
            )


@frozen
class Ran:
    """What was run. `str` gives it in words, for tables and plots.

    how: how requests were submitted, such as "batches of 4".
    speculative_config: with all defaults.
    versions: {distribution: version}.
    """

    name: str
    is_synthetic: bool
    model: str
    dtype: str
    device: str
    temperature: float
    how: str
    max_tokens: int | None
    num_speculative_tokens: int
    speculative_config: Mapping[str, Any]
    versions: Mapping[str, str]

    @classmethod
    def of(cls, configuration: Configuration, model: TimedModel, params: SamplingParams, how: str) -> Ran:
        info, config = model.llm.engine.target.info, model.llm.speculative_config
        return cls(
            name=configuration.name,
            is_synthetic=configuration.is_synthetic,
            model=str(info.model),
            dtype=str(info.dtype).removeprefix("torch."),
            device=str(info.device),
            temperature=params.temperature,
            how=how,
            max_tokens=params.max_tokens,
            num_speculative_tokens=model.llm.engine.num_speculative_tokens,
            speculative_config=_complete(config),
            versions=_versions(model, configuration),
        )

    def __str__(self) -> str:
        leading = {"method", "num_speculative_tokens"}
        others = {key: value for key, value in sorted(self.speculative_config.items()) if key not in leading}
        set_ones = [f"{key}={value}" for key, value in others.items() if value is not None]
        speculation = ", ".join([f"num_speculative_tokens={self.num_speculative_tokens}", *set_ones])
        label = " (no method: known tokens, accepted at these rates)" if self.is_synthetic else ""
        return (
            f"{self.model} in {self.dtype} on {self.device}, temperature {self.temperature:g}, {self.how}, at most "
            f"{self.max_tokens} tokens each; {self.name}{label} with {speculation}; "
            f"{', '.join(f'{name} {number}' for name, number in self.versions.items())}"
        )


def _complete(config: Any) -> dict[str, Any]:
    """Return the complete speculative_config of an LLM as a mapping; several methods are listed in `method`."""
    if config is None:
        return {}
    return {"method": [each.as_mapping() for each in config]} if isinstance(config, tuple) else config.as_mapping()


def _versions(model: TimedModel, configuration: Configuration) -> dict[str, str]:
    """Return the versions of the software that ran, {distribution: version}.

    These are Python, torch, transformers, specdec-core, and all plugins that provide the method or compiled operations.
    """
    parts = {*(f"proposer {method}" for method in configuration.method.split(" + ")), "ops"}
    listed = [plugin for plugin in model.plugins.listing() if plugin.status == "ok" and parts & {*plugin.provides}]
    found = {plugin.distribution: plugin.version for plugin in listed}
    named = {name: version(name) for name in ("torch", "transformers", "specdec-core")}
    return {"python": platform.python_version(), **named, **found}


class Numbers(click.ParamType["tuple[float, ...]"]):
    """The click type of numbers with commas between them, such as 1,4,16. All are above 0, unless zero is allowed."""

    name = "numbers"

    def __init__(self, kind: type[int | float] = float, *, zero: bool = False) -> None:
        self._kind, self._zero = kind, zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(self._kind(part) for part in value.split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all((self._zero and number == 0) or 0 < number < float("inf") for number in numbers):
            word = "whole numbers" if self._kind is int else "numbers"
            least = "of 0 or more" if self._zero else "above 0"
            self.fail(
                f"{value!r} is not a list: give {word} {least} with commas between them, without spaces", param, ctx
            )
        return numbers
