"""JSON bodies: what is written can be read by any client, and what is no JSON is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from specdec_server.json_text import dumps, dumps_in_parts, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(value=VALUES)
def test_what_is_written_is_read(value: object) -> None:
    """A text may have half of a surrogate pair: a model may write one in the arguments of a tool call."""
    assert json.loads(dumps({"value": value}).decode()) == {"value": value}


@given(value=VALUES, depth=st.integers(0, 4))
def test_in_parts_the_same_is_written(value: object, depth: int) -> None:
    assert dumps_in_parts({"a": [value]}, depth) == dumps({"a": [value]})


def test_characters_are_not_escaped_without_need() -> None:
    assert dumps({"a": "ä\ud800"}) == '{"a":"ä\\ud800"}'.encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"NaN", "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b"[1]", "it is a list, not an object"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"{", "Expecting"),
        (b"\xff", "codec can't decode"),
    ],
    ids=lambda each: str(each)[:20],
)
def test_what_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loads(text)
