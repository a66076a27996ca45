"""Finds tool calls in a model's output, whose text arrives in pieces.

A parser gives the same content and the same calls however the text is cut into pieces: it decides by the text up to a
character, never by where a piece ends. It holds back what may begin a call, and gives a call once it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

SPACE = " \t\r\n"


class ToolCall(NamedTuple):
    """arguments: JSON text."""

    name: str
    arguments: str


class Found(NamedTuple):
    """What a piece of text completed: text that belongs to no call, and calls."""

    content: str
    calls: list[ToolCall]


class ToolParser(Protocol):
    def feed(self, text: str) -> Found:
        """Take the next piece of the output."""

    def finish(self) -> Found:
        """Give what was held back, since no more text will come."""


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


class HermesParser:
    """Calls between tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write them.

    White space around calls is no content. What is between tags and is no call stays content, tags included.
    """

    MARKER = "<tool_call>"
    CLOSE = "</tool_call>"

    def __init__(self) -> None:
        self._text = ""  # not given yet
        self._space = ""  # before MARKER, while the text begins with it
        self._object: JSONObject | None = None  # while the text begins with MARKER
        self._is_closing = False  # a call is complete, and its CLOSE is not
        self._has_calls = False

    def feed(self, text: str) -> Found:
        self._text += text
        content, calls = "", list[ToolCall]()
        while True:
            if self._is_closing:
                rest = self._text.lstrip(SPACE)
                if len(rest) < len(self.CLOSE) and self.CLOSE.startswith(rest):
                    break
                self._is_closing, self._text = False, rest.removeprefix(self.CLOSE)
            elif self._object is not None:
                body = self._text.removeprefix(self.MARKER).lstrip(SPACE)
                if not body:
                    break
                start = len(self._text) - len(body)
                end = self._object.end(self._text, start) if body[0] == "{" else len(self.MARKER)
                if end is None:
                    break
                call = _call_of(self._text[start:end])
                content += "" if call else self._space + self._text[:end]
                calls += [call] if call else []
                self._is_closing, self._object, self._text = call is not None, None, self._text[end:]
            else:
                before, marker, _ = self._text.partition(self.MARKER)
                if not marker:
                    before = before[: len(before) - _len_of_beginning(before, self.MARKER)]
                shown = before.rstrip(SPACE)
                content += shown
                if not marker:
                    self._text = self._text[len(shown) :]
                    break
                self._space, self._object = before[len(shown) :], JSONObject()
                self._text = self._text[len(before) :]
            self._has_calls = self._has_calls or bool(calls)
        return Found(content, calls)

    def finish(self) -> Found:
        rest, self._text = (self._space if self._object else "") + self._text, ""
        return Found("" if self._is_closing or (self._has_calls and not rest.strip(SPACE)) else rest, [])


class Llama3Parser:
    """An output that is JSON alone: `{"name": ..., "parameters": {...}}`, several with `;` between them, as Llama 3
    writes them. An output that begins otherwise is content. So is everything from the first object on that is no
    call."""

    MARKER = "<|python_tag|>"

    def __init__(self) -> None:
        self._text = ""  # not given yet
        self._object: JSONObject | None = None  # while the text begins with an object
        self._has_calls = self._is_content = False

    def feed(self, text: str) -> Found:
        self._text += text
        calls: list[ToolCall] = []
        while not self._is_content:
            if self._object is None:
                rest = self._text.lstrip(SPACE + ";" * self._has_calls)
                if not self._has_calls:
                    if rest != self.MARKER and self.MARKER.startswith(rest):
                        break
                    rest = rest.removeprefix(self.MARKER).lstrip(SPACE)
                if not rest:
                    break
                self._is_content = rest[0] != "{"
                self._object, self._text = JSONObject(), self._text if self._is_content else rest
            else:
                end = self._object.end(self._text, 0)
                if end is None:
                    break
                call, self._object = _call_of(self._text[:end]), None
                self._is_content = call is None
                if call is not None:
                    self._has_calls, self._text = True, self._text[end:]
                    calls.append(call)
        content = ""
        if self._is_content:
            content, self._text = self._text, ""
        return Found(content, calls)

    def finish(self) -> Found:
        rest, self._text = self._text, ""
        return Found("" if self._has_calls and not rest.strip(SPACE + ";") else rest, [])


PARSERS: Mapping[str, Callable[[], ToolParser]] = {"hermes": HermesParser, "llama3_json": Llama3Parser}
"""{name, as in vLLM: parser}."""

MARKERS = {"hermes": HermesParser.MARKER, "llama3_json": Llama3Parser.MARKER}


def parser_shown_by(template: str) -> str | None:
    """The name of the parser whose calls a chat template mentions; None: it mentions no calls of these formats."""
    return next((name for name, marker in MARKERS.items() if marker in template), None)


def _call_of(text: str) -> ToolCall | None:
    """Read a call; None if the text is no JSON object with a name and arguments (or parameters)."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _len_of_beginning(text: str, marker: str) -> int:
    """How many characters at the text's end may be the beginning of the marker."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
