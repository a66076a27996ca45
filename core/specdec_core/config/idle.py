"""Options of other engines that this one accepts, and that change nothing here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Attribute, field

from specdec_core.config.fields import Check, shown
from specdec_core.config.hashing import UNHASHED

IDLE = "specdec_idle"
"""Key in the `metadata` of an attrs field whose option changes nothing. Its value is the reason."""


def idle_option(check: Check, reason: str, default: Any) -> Any:
    """Make a field for an option of other engines that this one accepts, and that changes nothing here.

    reason: why it changes nothing, for the help text and for the warning about a value other than the default.
    """
    metadata = {"help": f"Changes nothing: {reason}.", IDLE: reason, **UNHASHED}
    return field(default=default, validator=check, metadata=metadata)


def idle_values(attributes: Mapping[str, Attribute[Any]], given: Mapping[str, Any]) -> list[str]:
    """Return "KEY=VALUE changes nothing here: REASON" for each key of an `idle_option` that has a value other than its
    default.

    attributes: the fields of a config class, by name.
    given: keys and values as the user wrote them, which the class accepts.
    """
    return [
        f"{key}={shown(value)} changes nothing here: {attributes[key].metadata[IDLE]}"
        for key, value in given.items()
        if key in attributes and IDLE in attributes[key].metadata and value != attributes[key].default
    ]
