"""What a request asks of sampling, with vLLM's names and meanings."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from attrs import Attribute, field, frozen

from specdec_core.errors import ConfigError

SMALLEST_TEMPERATURE = 1e-5
"""Below it, dividing by the temperature would overflow long before it changed what is drawn."""


def _within(low: float, high: float, *, low_open: bool = False, optional: bool = False) -> Any:
    def check(instance: SamplingParams, attribute: Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        if not _is_number(value) or not (low <= value <= high) or (low_open and value == low):
            opening = "(" if low_open else "["
            none = " or None" if optional else ""
            raise ConfigError(
                f"{attribute.name}={value!r} is out of range: give a number in {opening}{low}, {high}]{none}"
            )

    return check


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _float(value: Any) -> Any:
    """Any kind of number, numpy's too, as Python's own. What is none is left to the validator."""
    return float(value) if _is_number(value) else value


def _whole(value: Any) -> Any:
    return int(value) if _is_number(value) and value == value // 1 else value


def _is_int(instance: SamplingParams, attribute: Attribute[Any], value: Any) -> None:
    if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
        raise ConfigError(f"{attribute.name}={value!r} must be a whole number")


def _is_bool(instance: SamplingParams, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name}={value!r} must be True or False")


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else (value,)
    if any(not isinstance(s, str) or not s for s in stops):
        raise ConfigError(f"stop={value!r} must be a non-empty string or a list of them")
    return stops


@frozen(kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    temperature 0 is greedy, and so is any below 1e-5. top_k 0 or -1 and top_p 1 keep every token. seed None: drawn once
    at submission. stop strings end the output and are cut from it. num_speculative_tokens overrides the engine's number
    for this request (0: no speculation); it cannot exceed it.
    """

    temperature: float = field(default=1.0, converter=_float, validator=_within(0.0, 100.0))
    top_p: float = field(default=1.0, converter=_float, validator=_within(0.0, 1.0, low_open=True))
    top_k: int = field(default=0, converter=_whole, validator=[_is_int, _within(-1, 2**31)])
    seed: int | None = field(
        default=None, converter=_whole, validator=[_is_int, _within(-(2**63), 2**63 - 1, optional=True)]
    )
    max_tokens: int | None = field(default=16, converter=_whole, validator=[_is_int, _within(1, 2**31, optional=True)])
    stop: tuple[str, ...] = field(default=None, converter=_strings)
    ignore_eos: bool = field(default=False, validator=_is_bool)
    skip_special_tokens: bool = field(default=True, validator=_is_bool)
    num_speculative_tokens: int | None = field(
        default=None, converter=_whole, validator=[_is_int, _within(0, 2**16, optional=True)]
    )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE
