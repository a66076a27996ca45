"""Checks for fields of attrs classes, which raise a ConfigError with the value, what is allowed and what to do.

Plugins use them for their own keys of speculative_config:

    num_heads: int = field(default=4, validator=whole_number(1, 64))
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from attrs import Attribute

from specdec_core.errors import ConfigError

Validator = Callable[[Any, "Attribute[Any]", Any], None]

LARGEST = 2**31 - 1

MOST_SHOWN = 200
"""Characters of a value in an error."""


def whole_number(low: int, high: int = LARGEST, *, optional: bool = False) -> Validator:
    """An integer in [low, high]; with optional, None too. Truth values, text and fractions are none."""

    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        fault = _fault(value) or _whole_fault(value, low, high)
        if fault:
            allowed = f"an integer from {low} to {high}{_or(optional)}"
            raise ConfigError(f"{attribute.name}={shown(value)} {fault}: give {allowed}")

    return check


def number(low: float, high: float, *, low_open: bool = False, optional: bool = False) -> Validator:
    """A number in [low, high], or with low_open in (low, high]; with optional, None too. NaN is none."""

    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        fault = _fault(value)
        if not fault and (not low <= value <= high or (low_open and value == low)):
            fault = "is out of range"
        if fault:
            interval = f"{'(' if low_open else '['}{low}, {high}]"
            raise ConfigError(f"{attribute.name}={shown(value)} {fault}: give a number in {interval}{_or(optional)}")

    return check


def flag(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    """True or False; numbers and text are none."""
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name}={shown(value)} must be True or False")


def one_of(*allowed: Any) -> Validator:
    """One of these values."""

    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if not any(isinstance(value, type(each)) and value == each for each in allowed):
            raise ConfigError(f"{attribute.name}={shown(value)} is not known: give {' or '.join(map(repr, allowed))}")

    return check


def text(*, optional: bool = False) -> Validator:
    """A string that is not empty; with optional, None too."""

    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if not (value is None and optional) and (not isinstance(value, str) or not value):
            raise ConfigError(f"{attribute.name}={shown(value)} must be text that is not empty{_or(optional)}")

    return check


def checkpoint(*, optional: bool = False) -> Validator:
    """A folder with a checkpoint, or a name on the model hub; with optional, None too. It is not looked for."""

    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if not (value is None and optional) and (not isinstance(value, str | Path) or not str(value)):
            raise ConfigError(f"{attribute.name}={shown(value)} must be a folder or a name{_or(optional)}")

    return check


def shown(value: Any) -> str:
    """A value as errors show it: cut where it is long, its type alone where it has no repr."""
    try:
        found = repr(value)
    except Exception:  # Python refuses to write integers of thousands of digits, too
        return f"<{type(value).__name__}>"
    return found if len(found) <= MOST_SHOWN else f"{found[:MOST_SHOWN]}..."


def is_number(value: Any) -> bool:
    """Of any kind, numpy's too, but not a truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _fault(value: Any) -> str:
    """Why it is no number; "" if it is one."""
    if isinstance(value, bool):
        return "is a truth value, not a number"
    if isinstance(value, str):
        return "is text, not a number"
    return "" if is_number(value) else "is not a number"


def _whole_fault(value: Any, low: int, high: int) -> str:
    if not isinstance(value, Integral):
        return "is not an integer"
    if int(value) < low:
        return "is too small"
    return "is too large" if int(value) > high else ""


def _or(optional: bool) -> str:
    return ", or None" if optional else ""
