"""Splits a speculative_config that names several methods into one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import fields_dict

from specdec_core.config.fields import shown
from specdec_core.config.speculative import SpeculativeConfig
from specdec_core.errors import ConfigError
from specdec_core.plugins import Plugins


def one_per_method(given: Any, plugins: Plugins) -> list[Any]:
    """Return the speculative_config of each method, in the order in which they are named: just `given` if it is that of
    one method.

    given: speculative_config as the user wrote it. Its `method` may be a list, whose entries are names, or dicts with
        the keys of one method. Other keys belong to each method that has them. Or a list of the configs themselves, or
        just the name of a method.

    Raises ConfigError.
    """
    if isinstance(given, str):
        return [{"method": given}]
    listed = isinstance(given, Sequence)
    entries: Any = given if listed else given.get("method") if isinstance(given, Mapping) else None
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return [given]
    if not entries:
        raise ConfigError(f"speculative_config={shown(given)} names no method: give one or more")
    shared = {} if listed else {key: value for key, value in given.items() if key != "method"}
    configs = [{"method": entry} if isinstance(entry, str) else entry for entry in entries]
    if not shared:
        return configs
    for config in configs:
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"speculative_config has {shown(config)} among its methods: give a name, or a dict with method and its "
                f"keys"
            )
    return [{**part, **config} for part, config in zip(_dealt(shared, configs, plugins), configs, strict=True)]


def refuse_repeated(configs: Sequence[SpeculativeConfig]) -> None:
    """Raise ConfigError if two configs are of the same method."""
    names = [config.method for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"speculative_config names the method {name!r} twice: give each method once")


def _dealt(shared: Mapping[str, Any], configs: Sequence[Mapping[str, Any]], plugins: Plugins) -> list[dict[str, Any]]:
    """Return the shared keys of each method: those that it has, and those that none of the methods has, which are an
    error there."""
    known = [_keys(config, plugins) for config in configs]
    parts: list[dict[str, Any]] = [{} for _ in configs]
    for key, value in shared.items():
        takers = [i for i, keys in enumerate(known) if key in keys]
        if key == "model" and len(takers) > 1:
            names = [shown(configs[i].get("method")) for i in takers]
            raise ConfigError(
                f"speculative_config has model={shown(value)}, and {' and '.join(names)} take one each: write it beside"
                f" its method, as in {{'method': [{{'method': {names[0]}, 'model': {shown(value)}}}, ...]}}"
            )
        for i in takers or range(len(configs)):
            parts[i][key] = value
    return parts


def _keys(config: Mapping[str, Any], plugins: Plugins) -> set[str]:
    """The keys that a method has in speculative_config, besides those of its verifier, which all methods share."""
    method = config.get("method")
    own = fields_dict(plugins.proposer(method).config).keys() if isinstance(method, str) else {"model"}
    return SpeculativeConfig.core_keys() | own
