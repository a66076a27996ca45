"""From what users give to what is kept, for fields of `SamplingParams`. Each raises a ConfigError that names its field.

Numbers of any kind become Python's own; what is none is left to the field's validator, or refused in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from specdec_core.errors import ConfigError
from specdec_core.validators import is_number, shown


def as_float(value: Any) -> Any:
    """Any kind of number, numpy's too, as Python's own. What is none, or too large, is left to the validator."""
    with suppress(OverflowError):
        return float(value) if is_number(value) else value
    return value


def as_whole(value: Any) -> Any:
    return int(value) if is_number(value) and value not in (inf, -inf) and value == value // 1 else value


def strings(name: str, value: Any) -> tuple[str, ...]:
    """A string, several, or None for no string."""
    if value is None:
        return ()
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else (value,)
    if any(not isinstance(each, str) or not each for each in found):
        raise ConfigError(f"{name}={shown(value)} must be a non-empty string or a list of them")
    for each in found:
        try:
            each.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{name} has {shown(each)}, which is not text: character {error.start} is half of a pair"
            ) from error
    return found


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Each once, in the order given. Whether the vocabulary has them is for the engine to say."""
    try:
        found = None if isinstance(value, str | bytes | Mapping) else tuple(map(as_whole, value))
    except TypeError:  # no iterable, or an array of no dimension
        found = None
    if found is None or any(type(token_id) is not int or token_id < 0 for token_id in found):
        raise ConfigError(f"{name}={shown(value)} must be a list of token ids: integers from 0 on")
    return tuple(dict.fromkeys(found))


def biases(name: str, value: Any) -> dict[int, float] | None:
    """{token id: a number from -100 to 100}, or None."""
    if value is None:
        return None
    found = {as_whole(key): as_float(bias) for key, bias in value.items()} if isinstance(value, Mapping) else {-1: 0}
    if any(type(token_id) is not int or token_id < 0 for token_id in found):
        raise ConfigError(f"{name}={shown(value)} must be a dict from token ids, integers from 0 on, to numbers")
    for token_id, bias in found.items():
        if type(bias) is not float or not -100 <= bias <= 100:
            raise ConfigError(f"{name}={shown({token_id: bias})} is out of range: give numbers in [-100, 100]")
    return found


def callables(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    """Several, or None for none."""
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(map(callable, value)):
        raise ConfigError(f"{name}={shown(value)} must be a list of callables (logits, token_ids) -> logits")
    return tuple(value)
