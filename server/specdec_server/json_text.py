"""Reads and writes JSON bodies."""

from __future__ import annotations

import json
from random import getrandbits
from typing import Any

from starlette.responses import Response


def dumps(value: Any) -> bytes:
    """Write a value as JSON in UTF-8. Half of a surrogate pair, which a model may write in the arguments of a tool
    call, becomes an escape."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def dumps_in_parts(value: Any, depth: int = 5) -> bytes:
    """`dumps` for large values: no call of Python's encoder takes long, so that other threads go on.

    depth: how many levels of lists and objects are taken apart. In an answer, 5 are down to the logprobs of a token.
    """
    if not depth or not isinstance(value, dict | list):
        return dumps(value)
    if isinstance(value, list):
        return b"[%b]" % b",".join(dumps_in_parts(each, depth - 1) for each in value)
    return b"{%b}" % b",".join(
        b"%b:%b" % (dumps(str(key)), dumps_in_parts(each, depth - 1)) for key, each in value.items()
    )


class JSONText(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def loads(text: bytes) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError with the reason in words if it is anything else. NaN and Infinity, which
    Python's parser would take, are refused."""
    try:
        found = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}, not an object")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def new_id(prefix: str) -> str:
    """Make the id of an answer or a tool call. A UUID would read the system's random numbers, for which Python gives up
    its lock, and the event loop then waits for the engine's thread."""
    return f"{prefix}{getrandbits(128):032x}"
