"""Descriptions of config options, read from the fields of config classes."""

from __future__ import annotations

from typing import Any

from attrs import Factory, field, frozen, validators

from specdec_core import DraftModelConfig, SpeculativeConfig, flag, number, one_of, text, whole_number
from specdec_core.config.fields import checkpoint, not_yet
from specdec_core.config.options import PARSED, Option, options_of


@frozen(kw_only=True)
class Shown:
    """A config class with a field of each kind. test_what_is_shown has the expected descriptions."""

    required: int = field(validator=whole_number(1, 64), metadata={"help": "One."})
    optional: int | None = field(default=None, validator=whole_number(1, optional=True))
    most: int = field(default=3, validator=whole_number(-(2**63), 7))
    any_integer: int = field(default=3, validator=whole_number(-(2**63), 2**64))
    share: float = field(default=0.5, validator=number(0, 1e9, low_open=True))
    is_fast: bool = field(default=False, validator=flag)
    match: str = field(default="last", validator=one_of("first", "last"))
    name: str | None = field(default=None, validator=text(optional=True))
    path: str = field(default="x", validator=checkpoint)
    fixed: int = field(default=1, validator=not_yet(1))
    foreign: int | None = field(default=2, validator=validators.optional(validators.ge(1)))
    plain: list[int] = Factory(list)
    said: Any = field(default=(), metadata={"help": "Two.", "allowed": "whatever you like"})
    long: str = "x" * 1000
    parsed: Any = field(default=None, metadata=PARSED)
    derived: int = field(default=0, init=False)


def test_what_is_shown() -> None:
    assert [(option.name, option.allowed, option.default) for option in options_of(Shown)] == [
        ("required", "an integer from 1 to 64", None),
        ("optional", "an integer from 1, or None", "None"),
        ("most", "an integer to 7", "3"),
        ("any_integer", "an integer", "3"),
        ("share", "a number in (0, 1e+09]", "0.5"),
        ("is_fast", "True or False", "False"),
        ("match", "'first' or 'last'", "'last'"),
        ("name", "text, or None", "None"),
        ("path", "a folder or a name", "'x'"),
        ("fixed", "1", "1"),
        ("foreign", "int | None", "2"),
        ("plain", "list[int]", "list()"),
        ("said", "whatever you like", "()"),
        ("long", "str", f"'{'x' * 199}..."),
    ]
    assert {option.name: option.help for option in options_of(Shown) if option.help} == {
        "required": "One.",
        "said": "Two.",
    }


def test_own_options_come_first() -> None:
    @frozen(kw_only=True)
    class Head(DraftModelConfig):
        num_heads: int = 3
        quantization: None = field(default=None, metadata={"help": "Not for heads."})

    options = options_of(Head)
    inherited = [option for option in options_of(DraftModelConfig) if option.name != "quantization"]
    assert options[0] == Option("num_heads", "int", "3", "")
    assert (options[1].name, options[1].help) == ("quantization", "Not for heads.")
    assert list(options[2:]) == inherited


def test_what_other_keys_are_parsed_to_is_no_option() -> None:
    assert {option.name for option in options_of(SpeculativeConfig)} == SpeculativeConfig.core_keys()
