"""A digest of a configuration that is the same in every process."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from attrs import fields, has

from specdec_core.errors import ConfigError

UNHASHED = {"specdec_unhashed": True}
"""`metadata` of an attrs field that does not change what is computed, so `config_hash` leaves it out."""


def config_hash(config: Any) -> str:
    """The sha256, in hex, of an attrs object's class and fields. Equal configurations have the same digest in every
    process. Fields marked UNHASHED, which do not change what is computed, are left out."""
    try:
        text = json.dumps(_plain(config), sort_keys=True, default=_plain)
    except ConfigError:
        raise
    except Exception as error:  # of a class of the caller's own
        raise ConfigError(
            f"a value in {type(config).__name__} cannot be written down for a hash: {type(error).__name__}: {error}. "
            f"Use attrs classes, numbers, text, lists or dicts"
        ) from error
    return sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Convert a value of any type to one for `json.dumps`. Raises ConfigError if the value has only
    Python's default repr, since the memory address in it differs between processes."""
    if has(type(value)):
        hashed = [attribute.name for attribute in fields(type(value)) if not attribute.metadata.get("specdec_unhashed")]
        return {"class": type(value).__qualname__, **{name: getattr(value, name) for name in hashed}}
    for convert in ("to_dict", "item"):  # transformers' configurations, numbers of numpy
        if hasattr(value, convert):
            return getattr(value, convert)()
    if callable(value) and hasattr(value, "__qualname__"):  # its repr would hold an address
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if type(value).__repr__ is object.__repr__:  # type: ignore[comparison-overlap]
        raise ConfigError(
            f"{value!r} has no stable form to make a hash of: use attrs classes, numbers, text, lists or dicts"
        )
    return str(value)
