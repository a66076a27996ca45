"""Schemas, patterns and grammars in many shapes: outputs match, with forced tokens and drafts as without them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import regex
from attrs import evolve
from nightly import IS_NIGHTLY
from shapes import Shape, shapes

from specdec_core import LLM, CompletionOutput, SamplingParams
from specdec_core.engine import engine as engine_module

NUM_SHAPES = 300 if IS_NIGHTLY else 30
MAX_TOKENS = 64
PROMPT = "# An example of the format:\n"
SHAPES = shapes(NUM_SHAPES, seed=5)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("tiny", dtype="float32", disable_log_stats=True) as llm:
        yield llm


def complete(llm: LLM, asked: list[Shape], max_tokens: int = MAX_TOKENS) -> list[CompletionOutput]:
    base = SamplingParams(temperature=0, max_tokens=max_tokens)
    params = [evolve(base, structured_outputs=shape.wanted) for shape in asked]
    return [output.outputs[0] for output in llm.generate([PROMPT] * len(asked), params, use_tqdm=False)]


@pytest.fixture(scope="module")
def outputs(plain: LLM) -> list[CompletionOutput]:
    return complete(plain, SHAPES)


def test_whole_outputs_match_and_most_are_whole(outputs: list[CompletionOutput]) -> None:
    whole = [(shape, each) for shape, each in zip(SHAPES, outputs, strict=True) if each.finish_reason == "stop"]
    assert {each.finish_reason for each in outputs} <= {"stop", "length"}
    assert len(whole) >= 0.6 * NUM_SHAPES
    for shape, output in whole:
        shape.check(output.text)


def test_outputs_that_are_cut_off_begin_like_whole_ones(plain: LLM, outputs: list[CompletionOutput]) -> None:
    cut = [(shape, each) for shape, each in zip(SHAPES, outputs, strict=True) if each.finish_reason == "length"]
    longer = complete(plain, [shape for shape, _ in cut], max_tokens=600)
    for (shape, output), complete_output in zip(cut, longer, strict=True):
        assert complete_output.token_ids[:MAX_TOKENS] == output.token_ids
        assert shape.pattern is None or regex.fullmatch(shape.pattern, output.text, partial=True)
        assert complete_output.finish_reason == "stop", (shape, complete_output.text[-200:])
        shape.check(complete_output.text)


def test_drafts_and_forced_tokens_change_no_output(
    monkeypatch: pytest.MonkeyPatch, plain: LLM, outputs: list[CompletionOutput]
) -> None:
    expected = [(each.token_ids, each.finish_reason) for each in outputs]
    with LLM("tiny", dtype="float32", disable_log_stats=True, speculative_config=NGRAM) as llm:
        assert [(each.token_ids, each.finish_reason) for each in complete(llm, SHAPES)] == expected
    monkeypatch.setattr(engine_module, "forced_tokens", lambda request: [])
    assert [(each.token_ids, each.finish_reason) for each in complete(plain, SHAPES)] == expected
