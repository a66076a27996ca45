"""Leaves out the arguments of vLLM that change nothing here, and refuses those that ask for something else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from attrs import fields_dict

from specdec_core.api.old_vllm_arguments import level_of_caller
from specdec_core.api.vllm_table import ENGINE, OPTIONS, SPECULATION, Foreign
from specdec_core.config.engine import EngineConfig
from specdec_core.config.fields import is_number, shown
from specdec_core.errors import ConfigError


def without_vllm_arguments(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the arguments of vLLM's engine that change nothing here, with one warning that names them. Raises
    ConfigError for one that asks for something else.

    keywords: the keywords of `LLM`. Those that are no arguments of vLLM stay as they are.
    """
    kept, idle = dict(keywords), {}
    for key, value in keywords.items():
        if key in OPTIONS:
            if _is_neutral(value, OPTIONS[key]) and value is not fields_dict(EngineConfig)[key].default:
                idle[key] = kept.pop(key)
        elif key in ENGINE:
            _refuse_unless_neutral(key, value, ENGINE[key])
            idle[key] = kept.pop(key)
    manager = keywords.get("kv_manager")
    if manager is not None and idle.get("enable_prefix_caching") is not None:
        raise ConfigError(
            f"enable_prefix_caching=False is given beside kv_manager={shown(manager)}, which decides whether prefixes "
            f"are cached: leave out the one or the other"
        )
    _warn(idle, "")
    return kept


def without_vllm_keys(mapping: Mapping[str, Any], known: Callable[[], Collection[str]]) -> dict[str, Any]:
    """Leave out the keys of a speculative_config that change nothing: those with the value None, and those of vLLM with
    a value that changes nothing here, the latter with one warning. Raises ConfigError for a key of vLLM that asks for
    something else.

    known: returns the keys of speculative_config with any method. Keys that are neither known nor vLLM's stay.
    """
    if not any(value is None or key in SPECULATION for key, value in mapping.items()):
        return dict(mapping)
    keys, kept, idle = known(), {}, {}
    for key, value in mapping.items():
        if key not in keys and key in SPECULATION:
            _refuse_unless_neutral(f"speculative_config has {key}", value, SPECULATION[key])
            idle[key] = value
        elif key not in keys or value is not None:
            kept[key] = value
    _warn({key: value for key, value in idle.items() if value is not None}, "speculative_config: ")
    return kept


def _is_neutral(value: Any, argument: Foreign) -> bool:
    def equals(neutral: Any) -> bool:
        with suppress(Exception):  # a class of the caller's own
            return (type(value) is type(neutral) or (is_number(value) and is_number(neutral))) and value == neutral
        return False

    return value is None or any(map(equals, argument.neutral))


def _refuse_unless_neutral(what: str, value: Any, argument: Foreign) -> None:
    if not _is_neutral(value, argument):
        allowed = " or ".join(map(shown, argument.neutral))
        advice = f", or give {allowed}" if allowed else ""
        raise ConfigError(f"{what}={shown(value)}, which is not supported: {argument.reason}. Leave it out{advice}")


def _warn(idle: Mapping[str, Any], where: str) -> None:
    if idle:
        named = ", ".join(f"{key}={shown(value)}" for key, value in idle.items())
        warnings.warn(f"{where}{named}: leave out what changes nothing here", stacklevel=level_of_caller())
