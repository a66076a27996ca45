"""Lists the options of a config class for documents, `--help` and listings."""

from __future__ import annotations

from typing import Any

from attrs import NOTHING, Attribute, fields, frozen

from specdec_core.config.fields import shown

PARSED = {"specdec_parsed": True}
"""`metadata` of an attrs field that users cannot give, because it holds what other keys were parsed to."""


@frozen
class Option:
    """One key of a config class, described for users."""

    name: str
    allowed: str  # the values that it takes, such as "an integer from 1, or None"
    default: str | None  # as Python writes it; None: the key must be given
    help: str  # what it does; "" where its field has no help


def options_of(config: type) -> tuple[Option, ...]:
    """The options of an attrs class: its own, then those of each class that it inherits from.

    An option's help is in its field's metadata, as `help`. The allowed values are in the metadata as `allowed`, or else
    come from a validator of `config.fields`, or else from the type annotation.
    """
    names = dict.fromkeys(name for parent in config.__mro__ for name in own_names(parent))
    return tuple(
        Option(each.name, _allowed(each), _default(each.default), str(each.metadata.get("help", "")))
        for each in (getattr(fields(config), name) for name in names)
        if is_key(each)
    )


def own_names(config: type) -> list[str]:
    """The names of the fields that the class itself defines, not those that it inherits."""
    return [attribute.name for attribute in vars(config).get("__attrs_attrs__", ()) if not attribute.inherited]


def is_key(attribute: Attribute[Any]) -> bool:
    """Whether users can give the field as an option."""
    return attribute.init and not attribute.metadata.get("specdec_parsed")


def _allowed(attribute: Attribute[Any]) -> str:
    written = attribute.metadata.get("allowed") or getattr(attribute.validator, "allowed", None)
    annotation = attribute.type if isinstance(attribute.type, str) else getattr(attribute.type, "__name__", "")
    return str(written or annotation)


def _default(default: Any) -> str | None:
    if default is NOTHING:
        return None
    factory = getattr(default, "factory", None)  # an attrs.Factory is not called for a listing
    return shown(default) if factory is None else f"{getattr(factory, '__name__', 'factory')}()"
