"""Messages whose content is a list of parts, as in {"role": "user", "content": [{"type": "text", "text": "Hello"}]}."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from specdec_core.config.fields import shown
from specdec_core.errors import ConfigError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
Part = dict[str, Any]


def with_readable_content(chat: Sequence[Message], render: Render) -> list[Message]:
    """Give a chat template each message's content in a form that it can read.

    Some templates iterate over content parts and read the text of each. Others print the content, and would print a
    list as Python writes it, or drop it. For these, the texts of the parts are joined with line breaks. Contents that
    are no lists stay as they are.

    chat: the messages of a conversation.
    render: a function that renders such messages with the chat template. It may raise anything.

    Raises ConfigError for a part that is not text.
    """
    parts = {
        index: [_text_part(part, f"content[{i}] of messages[{index}]") for i, part in enumerate(message["content"])]
        for index, message in enumerate(chat)
        if isinstance(message.get("content"), list | tuple)
    }
    if not parts:
        return list(chat)
    read = _read_as_parts(chat, parts, render)
    contents = {index: found if index in read else _joined(found) for index, found in parts.items()}
    return _with_contents(chat, contents)


def _text_part(part: Any, where: str) -> Part:
    """Return a content part as {"type": "text", "text": ...} with the part's other keys. Raises ConfigError if it is
    neither a string nor a part of type "text"."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or part.get("type", "text") != "text":
        kind = shown(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
        raise ConfigError(
            f"{where} is of type {kind}: models here read text only. Give {{'type': 'text', 'text': ...}} or a string"
        )
    if not isinstance(part.get("text"), str):
        raise ConfigError(f"{where} has text={shown(part.get('text'))}: give a string")
    return {"type": "text", **part}


def _joined(parts: Sequence[Part]) -> str:
    return "\n".join(part["text"] for part in parts if part["text"])


def _read_as_parts(chat: Sequence[Message], parts: Mapping[int, Sequence[Part]], render: Render) -> set[int]:
    """Find the messages of which the template reads the parts' texts. Returns their indices.

    The template is rendered with the parts, in each message with another text, and with another key beside it. If the
    output has the text without the key, the template took the text out of a part. If it has both, it printed the list.
    """
    tag = uuid4().hex
    marked = {
        index: [{**part, "text": f"{tag}text{index}.", f"{tag}key{index}.": ""} for part in found]
        for index, found in parts.items()
    }
    try:
        text = render(_with_contents(chat, marked))
    except Exception:  # a template is a program, and may raise anything
        return set()
    return {index for index in parts if f"{tag}text{index}." in text and f"{tag}key{index}." not in text}


def _with_contents(chat: Sequence[Message], contents: Mapping[int, Any]) -> list[Message]:
    return [
        {**message, "content": contents[index]} if index in contents else message for index, message in enumerate(chat)
    ]
