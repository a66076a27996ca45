"""What an engine is built from, checked by whoever owns each key."""

from __future__ import annotations

from collections.abc import Mapping, Set as AbstractSet
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from attrs import Attribute, field, fields, frozen

from specdec_core.errors import ConfigError


def _at_least(low: int, *, optional: bool = False) -> Any:
    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            none = " or None" if optional else ""
            raise ConfigError(f"{attribute.name}={value!r} is not allowed: give a whole number of at least {low}{none}")

    return check


def _is_bool(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name}={value!r} must be True or False")


def _is_seed(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ConfigError(f"{attribute.name}={value!r} must be a whole number or None")


def _is_name(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, str | Path):
        raise ConfigError(f"{attribute.name}={value!r} must be a folder or a name")


def _one_process(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if value != 1:
        raise ConfigError(f"{attribute.name}={value!r} is not supported yet: leave it out, or give 1")


def _fraction(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1):
        raise ConfigError(f"{attribute.name}={value!r} is not allowed: give a fraction of memory in (0, 1], or None")


@frozen(kw_only=True)
class SpeculativeConfig:
    """How to speculate: the core's own keys, and `options`, an instance of the method's config class.

    num_speculative_tokens: most draft tokens (for trees: nodes) per request and step.
    disable_by_batch_size: no drafts while more requests than this are running.
    """

    method: str
    num_speculative_tokens: int = field(validator=_at_least(1))
    disable_by_batch_size: int | None = field(default=None, validator=_at_least(1, optional=True))
    options: Any = None

    @classmethod
    def core_keys(cls) -> set[str]:
        return {attribute.name for attribute in fields(cls)} - {"options"}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], method_config: type) -> SpeculativeConfig:
        """One flat mapping of the core's keys and the method's. Raises ConfigError that names the nearest key."""
        own = {attribute.name for attribute in fields(method_config)}
        for key in mapping:
            if key not in cls.core_keys() | own:
                raise unknown_key(key, cls.core_keys() | own, f"speculative_config of method {mapping['method']!r}")
        if mapping.get("num_speculative_tokens") is None:
            raise ConfigError(
                f"speculative_config of method {mapping['method']!r} says no num_speculative_tokens: give the number "
                f"of tokens to draft per step, such as 5"
            )
        try:
            options = method_config(**{key: value for key, value in mapping.items() if key in own})
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"speculative_config of method {mapping['method']!r} is not complete: {error}") from error
        return cls(**{key: value for key, value in mapping.items() if key not in own}, options=options)


@frozen(kw_only=True)
class EngineConfig:
    """Everything about an engine but speculation. None: chosen from the model and the machine."""

    model: str | Path = field(validator=_is_name)
    dtype: Any = "auto"
    trust_remote_code: bool = field(default=False, validator=_is_bool)
    tensor_parallel_size: int = field(default=1, validator=_one_process)
    seed: int | None = field(default=None, validator=_is_seed)
    max_model_len: int | None = field(default=None, validator=_at_least(1, optional=True))
    max_num_seqs: int = field(default=256, validator=_at_least(1))
    max_num_batched_tokens: int = field(default=2048, validator=_at_least(1))
    block_size: int = field(default=16, validator=_at_least(1))
    num_kv_blocks: int | None = field(default=None, validator=_at_least(1, optional=True))
    gpu_memory_utilization: float | None = field(default=None, validator=_fraction)  # on a CPU: of its free memory

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], other_keys: AbstractSet[str] = frozenset()) -> EngineConfig:
        """other_keys: what whoever calls takes besides, for the error about an unknown key."""
        known = {attribute.name for attribute in fields(cls)}
        for key in mapping:
            if key not in known:
                raise unknown_key(key, known | other_keys, "LLM")
        return cls(**mapping)


def unknown_key(key: object, known: AbstractSet[str], where: str) -> ConfigError:
    near = get_close_matches(str(key), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "remove it."
    return ConfigError(f"{where} has no key {key!r}: {hint} The keys are {', '.join(sorted(known))}")
