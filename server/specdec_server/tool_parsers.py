"""Finds tool calls in a model's output, whose text arrives in pieces.

A parser gives the same content and the same calls however the text is cut into pieces: it decides by the text up to a
character, never by where a piece ends. It holds back what may begin a call, and gives a call once it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from specdec_server.tool_calls import SPACE, Found, JSONObject, ToolCall, call_of, len_of_beginning


class ToolParser(Protocol):
    def feed(self, text: str) -> Found:
        """Take the next piece of the output."""

    def finish(self) -> Found:
        """Give what was held back, since no more text will come."""


class HermesParser:
    """Calls between tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write them.

    White space around calls is no content. What is between tags and is no call stays content, tags included.

    The parser is in one of three states, each a method: outside of calls, after MARKER, and after a call. The method
    takes what it can from the beginning of `_text`. It sets the next state and returns True, or it needs more text and
    returns False.
    """

    MARKER = "<tool_call>"
    CLOSE = "</tool_call>"

    def __init__(self) -> None:
        self._text = ""  # not given yet
        self._content, self._calls = "", list[ToolCall]()  # found, and not given yet
        self._has_calls = False
        self._space = ""  # before MARKER
        self._object = JSONObject()  # after MARKER
        self._state: Callable[[], bool] = self._outside

    def feed(self, text: str) -> Found:
        self._text += text
        while self._state():
            pass
        found = Found(self._content, self._calls)
        self._content, self._calls = "", []
        return found

    def finish(self) -> Found:
        rest = self._text
        if self._state == self._in_call:
            rest = self._space + rest
        is_left_out = self._state == self._after_call or (self._has_calls and not rest.strip(SPACE))
        self._text = ""
        return Found("" if is_left_out else rest, [])

    def _outside(self) -> bool:
        """Give content up to MARKER, but for white space before it."""
        before, marker, _ = self._text.partition(self.MARKER)
        if not marker:
            before = before[: len(before) - len_of_beginning(before, self.MARKER)]
        shown = before.rstrip(SPACE)
        self._content += shown
        if not marker:
            self._text = self._text[len(shown) :]
            return False
        self._space, self._object = before[len(shown) :], JSONObject()
        self._text, self._state = self._text[len(before) :], self._in_call
        return True

    def _in_call(self) -> bool:
        """The text begins with MARKER. Give the call after it; MARKER is content if there is no call."""
        body = self._text.removeprefix(self.MARKER).lstrip(SPACE)
        if not body:
            return False
        start = len(self._text) - len(body)
        end = self._object.end(self._text, start) if body[0] == "{" else len(self.MARKER)
        if end is None:
            return False
        call, whole = call_of(self._text[start:end]), self._space + self._text[:end]
        self._text = self._text[end:]
        if call is None:
            self._content += whole
            self._state = self._outside
        else:
            self._calls.append(call)
            self._has_calls, self._state = True, self._after_call
        return True

    def _after_call(self) -> bool:
        """Leave CLOSE out, and white space before it. A call counts without CLOSE, too."""
        rest = self._text.lstrip(SPACE)
        if len(rest) < len(self.CLOSE) and self.CLOSE.startswith(rest):
            return False
        self._text, self._state = rest.removeprefix(self.CLOSE), self._outside
        return True


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
                call, self._object = call_of(self._text[:end]), None
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
