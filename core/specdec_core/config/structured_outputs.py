"""The sampling parameter structured_outputs: what outputs have to match, with vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from attrs import fields_dict, frozen
from attrs.converters import optional

from specdec_core.config.fields import check_text, flag, option, refuse_unknown, shown, strings
from specdec_core.errors import ConfigError

KINDS = ("json", "regex", "choice", "grammar", "json_object")


def _schema(value: Any) -> Any:
    """A JSON schema as text. The order of its keys is kept, since properties are written in that order."""
    if isinstance(value, str):
        return _text("json", value)
    try:
        return json.dumps(value) if isinstance(value, Mapping) else _text("json", value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"structured_outputs has json={shown(value)}, which is no JSON: {error}") from error


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"structured_outputs has {name}={shown(value)}: give text that is not empty")
    check_text(value, f"structured_outputs has {name}={shown(value)}, which")
    return value


@frozen(kw_only=True)
class StructuredOutputs:
    """What an output has to match, from its first token to its end. Exactly one of json, regex, choice, grammar and
    json_object is given."""

    json: str | None = option(
        None, "A JSON schema.", allowed="a JSON schema, as text or a dict, or None", converter=optional(_schema)
    )
    regex: str | None = option(
        None,
        "A regular expression for the whole output.",
        allowed="text, or None",
        converter=optional(partial(_text, "regex")),
    )
    choice: Sequence[str] | None = option(
        None,
        "Texts, of which the output is one.",
        allowed="a list of texts, or None",
        converter=optional(partial(strings, "choice")),
    )
    grammar: str | None = option(
        None,
        "A context-free grammar in Lark's notation, whose first rule is `start`.",
        allowed="text, or None",
        converter=optional(partial(_text, "grammar")),
    )
    json_object: bool = option(flag, "Any JSON object.", default=False)
    disable_any_whitespace: bool = option(
        flag, "Write JSON without spaces and line breaks between its parts.", default=False
    )

    @property
    def kind(self) -> str:
        """The name of the one field that is given, "regex" for example."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def __attrs_post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs has {' and '.join(given) or 'nothing to match'}: give exactly one of "
                f"{', '.join(KINDS)}"
            )
        if self.choice == ():
            raise ConfigError("structured_outputs has choice=[]: give at least one text")
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise ConfigError(f"disable_any_whitespace=True is about json: leave it out with {given[0]}")

    @classmethod
    def parse(cls, value: Any) -> StructuredOutputs | None:
        """Convert a mapping of these fields; None and instances stay. Raises ConfigError."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"structured_outputs={shown(value)} must be StructuredOutputs(...) or a dict, such as "
                f"{{'regex': '[0-9]+'}}"
            )
        refuse_unknown(value, fields_dict(cls).keys(), "structured_outputs")
        return cls(**value)
