"""Grammars and masks of llguidance, without an engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from specdec_core import ConfigError, EngineConfig, GrammarContext, StructuredOutputs, load_tokenizer
from specdec_core.sampling.grammar_state import GrammarState
from specdec_grammar.compiler import Compiler, Matcher

VOCAB_SIZE = 8192 + 45  # the tokenizer has 8192 tokens; the others are padding
EOS = 0
TOKENIZER = load_tokenizer(EngineConfig(model="tiny"))
COMPILER = Compiler(GrammarContext(TOKENIZER, VOCAB_SIZE, (EOS,)))


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether an output may be this text, in the tokens that the tokenizer makes of it."""
    token_ids = TOKENIZER(text, add_special_tokens=False).input_ids
    return matcher.accept(token_ids) == len(token_ids) and EOS in allowed(matcher)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), min_size=1, max_size=4))
def test_any_text_is_a_choice(texts: list[str]) -> None:
    choice = StructuredOutputs(choice=texts)
    for text in texts:
        assert accepts(COMPILER.compile(choice), text)
    others = {text[:-1] for text in texts} | {f"{text}x" for text in texts}
    for text in others - {*texts, ""}:
        assert not accepts(COMPILER.compile(choice), text)


def test_what_is_accepted() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for wanted, right, wrong in (
        ({"json": schema}, '{ "a" : 1 }', '{"a": "1"}'),
        ({"json": json.dumps(schema), "disable_any_whitespace": True}, '{"a":1}', '{"a": 1}'),
        ({"json_object": True}, '{"x": [1]}', "[1]"),
        ({"regex": "[ab]{2,3}"}, "aba", "abab"),
        ({"grammar": 'start: "a" tail?\ntail: "b" start'}, "aba", "ab"),
    ):
        assert accepts(COMPILER.compile(StructuredOutputs(**wanted)), right), wanted
        assert not accepts(COMPILER.compile(StructuredOutputs(**wanted)), wrong), wanted


def test_padding_of_the_vocabulary_is_forbidden() -> None:
    anything = StructuredOutputs(regex=r"(?s:.*)")
    found = allowed(COMPILER.compile(anything))
    assert len(found) > 7000
    assert max(found) < len(TOKENIZER) == 8192
    smaller = Compiler(GrammarContext(TOKENIZER, 1000, (EOS,)))  # than the tokenizer
    assert allowed(smaller.compile(anything), 992) == {token for token in found if token < 992}


def test_only_an_end_of_sequence_token_follows_a_complete_grammar() -> None:
    compiler = Compiler(GrammarContext(TOKENIZER, VOCAB_SIZE, (EOS, 1)))
    matcher = compiler.compile(StructuredOutputs(choice=["yes"]))
    assert not {EOS, 1} & allowed(matcher)
    assert accepts(matcher, "yes")
    assert allowed(matcher) == {EOS, 1}


def test_requests_share_a_compiled_grammar_but_not_its_state() -> None:
    first, second = (COMPILER.compile(StructuredOutputs(choice=["yes", "no"])) for _ in range(2))
    before = allowed(second)
    assert accepts(first, "yes")
    assert allowed(second) == before != allowed(first)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_masks_do_not_depend_on_the_way(data: st.DataObject) -> None:
    """A state that walked over other paths first masks as a new matcher that accepted the path alone."""
    wanted = data.draw(
        st.sampled_from(
            [
                StructuredOutputs(json_object=True),
                StructuredOutputs(regex=r"(def|class) \w+(\(\))?: [a-z ]{3,20}"),
                StructuredOutputs(grammar='start: item ("," item)*\nitem: /[a-z]+/ "=" /[0-9]+/'),
            ]
        )
    )
    state = GrammarState(lambda: COMPILER.compile(wanted), VOCAB_SIZE)
    output: list[int] = []
    for _ in range(data.draw(st.integers(1, 4))):
        paths: list[list[int]] = [[]]
        for _ in range(data.draw(st.integers(0, 6))):
            above = data.draw(st.sampled_from(paths))
            fresh = COMPILER.compile(wanted)
            fits = fresh.accept([*output, *above]) == len(output) + len(above) and EOS not in above
            likely = sorted(allowed(fresh)) if fits else [EOS]
            paths.append([*above, data.draw(st.sampled_from(likely) | st.integers(0, 8191))])
        masks = np.full((len(paths), -(-VOCAB_SIZE // 32)), -1, dtype=np.int32)
        assert state.mask(np.array(output, dtype=np.int64), paths, masks) == {}
        for path, mask in zip(paths, masks, strict=True):
            fresh, expected = COMPILER.compile(wanted), np.full_like(masks[0], -1)
            if fresh.accept([*output, *path]) == len(output) + len(path):
                fresh.fill(expected)
            assert np.array_equal(mask, expected)
        output += [token for token in data.draw(st.sampled_from(paths)) if token != EOS]
        fresh = COMPILER.compile(wanted)
        output = output[: fresh.accept(output)]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"json": '{"type":'}, "json='{\"type\":', which cannot be compiled"),
        ({"json": {"type": "wat"}}, "Invalid type: wat"),
        ({"json": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"grammar": "start: item"}, 'unknown name: "item"'),
        ({"grammar": "start: start"}, "NoExtension"),
        ({"regex": r"[^\x00-\x{10FFFF}]"}, "NoExtension"),
    ],
)
def test_a_wrong_grammar_is_refused(wanted: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        COMPILER.compile(StructuredOutputs(**wanted))
    assert says in str(caught.value)


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="need a fast tokenizer of transformers"):
        Compiler(GrammarContext(["a"], 1, (EOS,)))
