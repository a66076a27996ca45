"""Tool calls are found however the output is cut into pieces, and what is no call stays content."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings, strategies as st

from specdec_server.tool_calls import Found
from specdec_server.tool_parsers import PARSERS, parser_shown_by

HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"x": "a}b\\"{"}}'
PARTS = st.sampled_from(
    [
        HERMES,
        LLAMA,
        '<tool_call>{"name": "g", "arguments": {"text": "</tool_call> \\\\"}}</tool_call>',
        "<tool_call>",
        "</tool_call>",
        "<tool_call>no call</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        "<|python_tag|>",
        "<",
        "<tool",
        ";",
        " ",
        "\n",
        "{",
        '"',
        "\\",
        "text",
        '{"a": {"b": []}}',
    ]
)
TEXTS = st.lists(PARTS, max_size=8).map("".join)


def parse(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the joined content and the calls that a parser finds in these pieces of an output."""
    parser = PARSERS[name]()
    found = [*map(parser.feed, pieces), parser.finish()]
    return "".join(each.content for each in found), [tuple(call) for each in found for call in each.calls]


def cut(text: str, places: set[int]) -> list[str]:
    bounds = [0, *sorted(place for place in places if 0 < place < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


@pytest.mark.parametrize("name", PARSERS)
@settings(deadline=None, max_examples=400)
@given(text=TEXTS, places=st.sets(st.integers(1, 300)))
@example(text=LLAMA + " ; x y", places={len(LLAMA) + 3, len(LLAMA) + 4, len(LLAMA) + 5})
@example(text=" a <tool_call> b", places={2, 3, 8, 14})
def test_pieces_do_not_matter(name: str, text: str, places: set[int]) -> None:
    whole = parse(name, [text])
    assert parse(name, cut(text, places)) == whole
    assert parse(name, list(text)) == whole


@pytest.mark.parametrize("name", PARSERS)
@settings(deadline=None, max_examples=200)
@given(text=TEXTS)
def test_an_output_without_calls_is_content(name: str, text: str) -> None:
    content, calls = parse(name, list(text))
    if not calls:
        assert content in (text, text.lstrip().removeprefix("<|python_tag|>").lstrip())


ARGUMENTS = st.dictionaries(st.text(max_size=5), st.text(max_size=12) | st.integers() | st.lists(st.booleans()))


@settings(deadline=None, max_examples=200)
@given(calls=st.lists(st.tuples(st.text(min_size=1, max_size=5), ARGUMENTS), min_size=1, max_size=3), before=st.text())
def test_calls_are_those_written(calls: list, before: str) -> None:
    before = before.replace("<", "").strip()
    expected = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    bodies = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    text = before + "\n" + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    assert parse("hermes", list(text)) == (before, expected)
    bodies = [body.replace('"arguments"', '"parameters"', 1) for body in bodies]
    if all('"parameters"' in body for body in bodies):
        assert parse("llama3_json", ["<|python_tag|>", *"; ".join(bodies)]) == ("", expected)


def test_a_call_is_given_as_soon_as_it_is_complete() -> None:
    parser = PARSERS["hermes"]()
    assert parser.feed("I look. <tool_") == Found("I look.", [])
    assert parser.feed('call>{"name": "f", "arguments": {}}').calls == [("f", "{}")]
    assert parser.feed("</tool_call>") == Found("", [])
    assert parser.finish() == Found("", [])


@pytest.mark.parametrize(
    ("template", "name"),
    [("{{ '<tool_call>' }}", "hermes"), ("{{ '<|python_tag|>' }}", "llama3_json"), ("{{ messages }}", None)],
)
def test_the_template_shows_the_format(template: str, name: str | None) -> None:
    assert parser_shown_by(template) == name
