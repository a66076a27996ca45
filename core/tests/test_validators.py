"""Checks of configuration values: each kind of wrong value gets its own message."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from pathlib import PosixPath
from typing import Any

import numpy as np
import pytest
from attrs import NOTHING, field, fields, frozen
from hypothesis import given, strategies as st

from specdec_core import (
    ConfigError,
    EngineConfig,
    SamplingParams,
    TokenTree,
    flag,
    number,
    one_of,
    text,
    whole_number,
)
from specdec_core.config.draft_options import DraftModelConfig
from specdec_core.config.fields import shown
from specdec_core.config.hashing import config_hash
from specdec_core.config.verifiers import TypicalConfig


@frozen
class Options:
    depth: int = field(default=2, validator=whole_number(1, 64))
    limit: int | None = field(default=None, validator=whole_number(1, optional=True))
    share: float = field(default=0.5, validator=number(0, 1, low_open=True))
    is_fast: bool = field(default=False, validator=flag)
    match: str = field(default="last", validator=one_of("first", "last"))
    name: str | None = field(default=None, validator=text(optional=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth=0 is too small: give an integer from 1 to 64"),
        ({"depth": -3}, "depth=-3 is too small"),
        ({"depth": 65}, "depth=65 is too large"),
        ({"depth": 2**70}, "is too large"),
        ({"depth": True}, "depth=True is a truth value"),
        ({"depth": "5"}, "depth='5' is text, not a number"),
        ({"depth": 2.5}, "depth=2.5 is not an integer"),
        ({"depth": 2.0}, "depth=2.0 is not an integer"),
        ({"depth": None}, "depth=None is not a number"),
        ({"depth": [5]}, "is not a number"),
        ({"limit": 0}, "from 1 to 2147483647, or None"),
        ({"share": 0}, r"share=0 is out of range: give a number in \(0, 1\]"),
        ({"share": 1.5}, "share=1.5 is out of range"),
        ({"share": float("nan")}, "share=nan is out of range"),
        ({"share": "0.5"}, "share='0.5' is text"),
        ({"share": True}, "share=True is a truth value"),
        ({"is_fast": 1}, "is_fast=1 must be True or False"),
        ({"match": "longest"}, "match='longest' is not known: give 'first' or 'last'"),
        ({"name": ""}, "name='' must be text that is not empty, or None"),
    ],
    ids=str,
)
def test_a_wrong_value_is_called_what_it_is(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options(**options)


@given(depth=st.integers(1, 64), share=st.floats(0, 1, exclude_min=True), limit=st.none() | st.integers(1, 2**31 - 1))
def test_what_is_in_range_is_taken(depth: int, share: float, limit: int | None) -> None:
    options = Options(depth=depth, share=share, limit=limit)
    assert (options.depth, options.share, options.limit) == (depth, share, limit)


def test_numbers_of_other_libraries_are_numbers() -> None:
    assert Options(depth=np.int64(3), share=Fraction(1, 2)).depth == 3
    with pytest.raises(ConfigError, match="depth"):
        Options(depth=np.float32(3.5))


class Counted:
    num_shown = 0

    def __repr__(self) -> str:
        Counted.num_shown += 1
        return "x"


@pytest.mark.parametrize(
    "nest",
    [lambda x: [x] * 9, lambda x: (x,) * 9, lambda x: {1: x, 2: x, "3": x}],
    ids=["list", "tuple", "dict"],
)
def test_no_more_of_a_value_is_written_than_is_shown(nest: Any) -> None:
    """Formatting a nested value stops at the maximum length. The whole repr would have 9 ** 5 entries."""
    value: Any = Counted()
    for _ in range(5):
        value = nest(value)
    Counted.num_shown = 0
    found = shown(value)
    assert Counted.num_shown < 200
    assert len(found) == 203
    whole = repr(nest(nest(1)))
    assert found.endswith("...")
    assert shown(nest(nest(1)), 1000) == whole
    assert shown(nest(nest(1)), 5) == f"{whole[:5]}..."


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams])
@pytest.mark.parametrize("depth", [1, 5])
def test_no_option_writes_a_whole_value(config: Any, depth: int) -> None:
    value: Any = Counted()
    for _ in range(depth):
        value = [value] * 9
    required = {attribute.name: "x" for attribute in fields(config) if attribute.default is NOTHING}
    for attribute in fields(config):
        Counted.num_shown = 0
        with suppress(ConfigError):
            config(**{**required, attribute.name: value})
        assert Counted.num_shown < 200, attribute.name
    with pytest.raises(ConfigError, match="is not a list of paths"):
        TokenTree.parse(value)
    assert Counted.num_shown < 600


def test_a_list_within_itself_is_shown() -> None:
    value: list[Any] = []
    value.append(value)
    assert shown(value, 3) == "[[[..."


def raising(base: type, *args: Any, module: str = __name__) -> Any:
    """Return an object of a new subclass of `base` that raises when it is converted to text. module: the subclass's
    __module__."""

    def fail(self: Any, *args: Any) -> Any:
        raise OSError("no text")

    return type("Mute", (base,), {"__repr__": fail, "__str__": fail, "__fspath__": fail, "__module__": module})(*args)


MUTE = [
    raising(object),
    raising(object, module="torch"),
    [raising(object)],
    {"a": raising(object)},
    raising(str, "x"),
    raising(str),
    raising(int, -5),
    raising(int, 5),
    raising(float, -7e9),
    raising(list),
    raising(dict),
    raising(PosixPath, "/x"),
]


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams, TypicalConfig, DraftModelConfig])
@pytest.mark.parametrize("value", MUTE, ids=range(len(MUTE)))
def test_a_value_that_cannot_be_written_is_refused_or_taken(config: Any, value: Any) -> None:
    required = {attribute.name: "x" for attribute in fields(config) if attribute.default is NOTHING}
    for attribute in fields(config):
        with suppress(ConfigError):
            made = config(**{**required, attribute.name: value})
            config_hash(made)


def test_how_it_is_refused() -> None:
    for name, value in (("dtype", raising(object, module="torch")), ("dtype", raising(str, "x"))):
        with pytest.raises(ConfigError, match="dtype=<Mute> is not known: give 'auto' or 'float32'"):
            EngineConfig(model="x", **{name: value})
    with pytest.raises(ConfigError, match="model=<Mute> must be a folder or a name, of at most 4096 characters"):
        EngineConfig(model=raising(str, "x"))
    with pytest.raises(ConfigError, match="LLM has no key <Mute>: remove it"):
        EngineConfig.from_mapping({raising(object): 1})

    def fail(self: Any) -> int:
        raise OSError("no number")

    with pytest.raises(ConfigError, match="depth=5 cannot be checked, it raises OSError: give an integer from 1 to 64"):
        Options(depth=type("Loud", (int,), {"__int__": fail})(5))
    with pytest.raises(
        ConfigError, match="a value in EngineConfig cannot be written down for a hash: OSError: no text"
    ):
        EngineConfig(model="x", quantization=raising(object)).compute_hash()


@pytest.mark.parametrize("value", [(), (1,), [], {}, {"a": [1]}, "it's", b"x", 1.5, {1}, [(1, 2), "x"]], ids=repr)
def test_short_values_are_shown_as_they_are(value: Any) -> None:
    assert shown(value) == repr(value)
