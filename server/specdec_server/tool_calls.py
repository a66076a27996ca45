"""A tool call, and what finds one in a text that arrives in pieces."""

from __future__ import annotations

import json
from typing import NamedTuple

SPACE = " \t\r\n"


class ToolCall(NamedTuple):
    """arguments: JSON text."""

    name: str
    arguments: str


class Found(NamedTuple):
    """What a piece of text completed: text that belongs to no call, and calls."""

    content: str
    calls: list[ToolCall]


class JSONObject:
    """Finds where a JSON object ends. It starts before the object's opening brace."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = self._is_escaped = False
        self._num_read = 0

    def end(self, text: str, start: int) -> int | None:
        """Return the index behind the object's closing brace; None if it is not in the text yet.

        text: the same as in earlier calls, and more. start: the index of the object's opening brace.
        """
        for index in range(start + self._num_read, len(text)):
            character = text[index]
            if self._is_string:
                self._is_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._is_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if self._depth == 0:
                    return index + 1
        self._num_read = len(text) - start
        return None


def call_of(text: str) -> ToolCall | None:
    """Read a call; None if the text is no JSON object with a name and arguments (or parameters)."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def len_of_beginning(text: str, marker: str) -> int:
    """How many characters at the text's end may be the beginning of the marker."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
