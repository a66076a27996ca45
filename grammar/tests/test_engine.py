"""Structured output in the engine: every output matches what was asked for, and is that of plain decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from asking import CALL, CHOICE, ITEMS, METHODS, PROMPTS, SCHEMA, SETTINGS, params
from attrs import evolve
from grammar_faults import drafts_count_as_output, the_parent_s_mask

from specdec_core import LLM, ConfigError, Plugins, SamplingParams
from specdec_grammar.compiler import Matcher


def check_json(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def check_pattern(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


def check_choice(text: str) -> None:
    assert text in CHOICE, text


CHECKS = [check_json, check_pattern(CALL), None, check_choice, check_pattern(ITEMS)]


def check(completions: list[Any]) -> None:
    """Outputs that ended by themselves are right; others can be continued to a right one, where that is checked."""
    for completion, is_right in zip(completions, CHECKS, strict=True):
        assert completion.finish_reason in ("stop", "length"), completion
        if is_right is not None and completion.finish_reason == "stop":
            is_right(completion.text)
    if completions[-1].finish_reason == "length":
        ends = ("", "1", "=1", "a=1", "aa=1")
        assert any(re.fullmatch(ITEMS, completions[-1].text + end) for end in ends), completions[-1].text


def run(llm: LLM, asked: list[SamplingParams]) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(PROMPTS, asked, use_tqdm=False)]


def check_run(llm: LLM, temperature: float, expected: dict[float, list[list[int]]]) -> None:
    completions = run(llm, params(temperature))
    check(completions)
    assert tokens(completions) == expected[temperature]


def tokens(completions: list[Any]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def counted(llm: LLM, name: str) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name.endswith(name))


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("tiny", **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def ngram() -> Iterator[LLM]:
    with LLM("tiny", speculative_config={**METHODS["ngram"], "adaptive_draft_length": False}, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> dict[float, list[list[int]]]:
    found = {}
    for temperature in (0.0, 1.0):
        completions = run(plain, params(temperature))
        check(completions)
        assert {each.finish_reason for each in completions[:2]} == {"stop"}
        found[temperature] = tokens(completions)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_output_is_that_of_plain_decoding(method: str, expected: dict[float, list[list[int]]]) -> None:
    config = {**METHODS[method], "adaptive_draft_length": False}
    with LLM("tiny", speculative_config=config, **SETTINGS) as llm:
        for temperature in expected:
            check_run(llm, temperature, expected)
        drafted, accepted = (counted(llm, f"num_{kind}_tokens") for kind in ("draft", "accepted"))
        assert drafted > accepted > 10


def test_outputs_match_where_draft_tokens_are_sampled() -> None:
    """They are drawn from distributions that know nothing of the grammars."""
    config = {**METHODS["eagle3, tree"], "adaptive_draft_length": False, "draft_sample_method": "probabilistic"}
    with LLM("tiny", speculative_config=config, **SETTINGS) as llm:
        for seed in range(3):
            check(run(llm, [evolve(each, seed=seed) for each in params(1.0)]))
        assert counted(llm, "num_accepted_tokens") > 10


def test_preempted_requests_go_on_in_their_grammars(expected: dict[float, list[list[int]]]) -> None:
    config = {**METHODS["ngram"], "adaptive_draft_length": False}
    small = {"block_size": 4, "num_kv_blocks": 21, "max_model_len": 80}
    with LLM("tiny", speculative_config=config, **SETTINGS, **small) as llm:
        reports: list[Any] = []
        llm.engine._step_finished = reports.append
        for temperature in expected:
            reports.clear()
            check_run(llm, temperature, expected)
            assert sum(report.num_preempted for report in reports) > 0
        llm.engine.kv.check_integrity()


def test_a_cancelled_request_leaves_the_others_alone(ngram: LLM, expected: dict[float, list[list[int]]]) -> None:
    engine, found = ngram.engine, {}

    def listen(request: Any, pieces: Any) -> None:
        found[request.id] = request

    prompts = [ngram.get_tokenizer()(prompt).input_ids for prompt in PROMPTS]
    ids = [engine.add_request(*each, listen) for each in zip(prompts, params(0.0), strict=True)]
    for _ in range(3):
        engine.step()
    engine.cancel(ids[4])
    while engine.has_unfinished:
        engine.step()
    assert found[ids[4]].finish_reason == "abort"
    assert [found[each].output_token_ids for each in ids[:4]] == expected[0.0][:4]
    engine.kv.check_integrity()


def test_each_of_n_completions_has_a_state_of_its_own(plain: LLM, ngram: LLM) -> None:
    asked = SamplingParams(n=3, temperature=1, seed=5, max_tokens=40, structured_outputs={"regex": CALL})
    outputs = [llm.generate(PROMPTS[0], asked, use_tqdm=False)[0].outputs for llm in (plain, ngram)]
    assert tokens(outputs[0]) == tokens(outputs[1])
    assert len(set(map(tuple, tokens(outputs[0])))) > 1
    for completion in outputs[0]:
        check_pattern(CALL)(completion.text)


def test_other_parameters_apply_under_a_grammar(plain: LLM, ngram: LLM) -> None:
    more = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_k": 20, "min_p": 0.01, "bad_words": ["class"]}
    outputs = [run(llm, params(1.0, **more)) for llm in (plain, ngram)]
    check(outputs[0])
    assert tokens(outputs[0]) == tokens(outputs[1])


def no_rollback(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Matcher, "rollback", lambda self, num_tokens: None)


def no_end(patch: pytest.MonkeyPatch) -> None:
    fill = Matcher.fill

    def filled(self: Matcher, mask: np.ndarray) -> None:
        fill(self, mask)
        mask[0] &= ~1  # the end-of-sequence token

    patch.setattr(Matcher, "fill", filled)


@pytest.mark.parametrize("mutation", [the_parent_s_mask, no_rollback, drafts_count_as_output, no_end])
def test_a_wrong_mask_is_noticed(
    mutation: Callable[..., None], ngram: LLM, expected: dict[float, list[list[int]]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        with pytest.raises(AssertionError):
            check_run(ngram, 0.0, expected)
    check_run(ngram, 0.0, expected)


def test_a_grammar_that_fails_ends_its_own_request(ngram: LLM, expected: dict[float, list[list[int]]]) -> None:
    def fail(self: Matcher) -> None:
        if self._matcher.is_accepting():
            raise RuntimeError("too complex")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Matcher, "_check", fail)
        asked = params(0.0)
        completions = run(ngram, [asked[2], asked[2], asked[2], asked[3], asked[2]])
    assert [completion.finish_reason == "error" for completion in completions] == [False, False, False, True, False]
    assert tokens(completions)[3] == expected[0.0][3][:-1]
    check_choice(completions[3].text)


def test_a_grammar_that_exceeds_a_limit_ends_its_own_request(ngram: LLM) -> None:
    asked = params(0.0)
    asked[2] = evolve(asked[2], structured_outputs={"regex": "(((a{1000}){1000}){1000})"})
    completions = run(ngram, asked)
    assert [completion.finish_reason == "error" for completion in completions] == [False, False, True, False, False]
    assert completions[2].error.endswith("RuntimeError: lexer error: too many expressions constructed")


@pytest.mark.parametrize(
    ("settings", "wanted", "says"),
    [
        ({}, {"regex": "("}, "unclosed group"),
        ({}, {"json": {"type": "wat"}}, "Invalid type: wat"),
        ({"skip_tokenizer_init": True}, {"regex": "a"}, "need a tokenizer: leave out skip_tokenizer_init=True"),
        ({"plugins": "llguidance"}, {"regex": "a"}, "install specdec-grammar. Not usable: llguidance (disabled)"),
    ],
)
def test_refused_at_submission(plain: LLM, settings: dict[str, Any], wanted: dict[str, str], says: str) -> None:
    if "plugins" in settings:
        settings = {"plugins": Plugins.load(disable=settings["plugins"])}
    llm = LLM("tiny", **SETTINGS, **settings) if settings else plain
    with pytest.raises(ConfigError) as caught:
        llm.generate({"prompt_token_ids": [5]}, SamplingParams(structured_outputs=wanted), use_tqdm=False)
    assert says in str(caught.value)
    assert not llm.engine.has_unfinished
