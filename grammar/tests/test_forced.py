"""Tokens that a grammar leaves no choice about become output at once. The output is as if they had been computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from asking import METHODS, PROMPTS, SETTINGS, params
from attrs import evolve

from specdec_core import LLM, SamplingParams, StructuredOutputs
from specdec_core.engine import engine as engine_module
from specdec_core.engine.forced import forced_tokens

RECORD = {
    "type": "object",
    "properties": {
        "first_measurement": {"type": "integer", "minimum": 0, "maximum": 9},
        "second_measurement": {"type": "boolean"},
        "unit_of_both_measurements": {"const": "millimetres"},
    },
    "required": ["first_measurement", "second_measurement", "unit_of_both_measurements"],
    "additionalProperties": False,
}
JSON = StructuredOutputs(json=RECORD, disable_any_whitespace=True)
GREEDY = SamplingParams(temperature=0, max_tokens=64, structured_outputs=JSON)


@pytest.fixture(scope="module", params=[None, *METHODS])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    config = None if request.param is None else METHODS[request.param]
    with LLM("tiny", speculative_config=config, **SETTINGS) as made:
        yield made


def run(llm: LLM, sampling: list[SamplingParams]) -> tuple[list[Any], int]:
    """The completions of PROMPTS, and how often a request got output from a forward pass."""
    engine, ended = llm.engine, {}
    engine.forget()  # suffix would find the outputs of an earlier run
    tokenizer = llm.get_tokenizer()
    ids = [
        engine.add_request(tokenizer.encode(prompt), each, lambda request, _: ended.__setitem__(request.id, request))
        for prompt, each in zip(PROMPTS, sampling, strict=True)
    ]
    num_steps = 0
    while engine.has_unfinished:
        num_steps += len(engine.step().output_per_request)
    outputs = [ended[request_id] for request_id in ids]
    return [(each.output_token_ids, each.finish_reason, each.text.text) for each in outputs], num_steps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_is_as_if_they_were_computed(monkeypatch: pytest.MonkeyPatch, llm: LLM, temperature: float) -> None:
    sampling = [*params(temperature)[:-1], evolve(GREEDY, temperature=temperature, seed=11)]
    found, num_steps = run(llm, sampling)
    with monkeypatch.context() as patching:
        patching.setattr(engine_module, "forced_tokens", lambda request: [])
        expected, num_without = run(llm, sampling)
    assert found == expected
    assert num_steps < num_without


def test_a_wrong_forced_token_is_noticed(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    expected = run(llm, [GREEDY] * 5)[0]
    wrong = lambda request: [token + 1 for token in forced_tokens(request)]  # noqa: E731
    monkeypatch.setattr(engine_module, "forced_tokens", wrong)
    assert run(llm, [GREEDY] * 5)[0] != expected


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("tiny", **SETTINGS) as made:
        yield made


def steps_of(llm: LLM, sampling: SamplingParams) -> tuple[list[int], int]:
    """The output for the first prompt, and how many forward passes it took."""
    outputs, num_steps = run(llm, [sampling] * 5)
    return outputs[0][0], num_steps // 5


def test_most_of_a_schema_takes_no_forward_pass(plain: LLM) -> None:
    token_ids, num_steps = steps_of(plain, GREEDY)
    assert num_steps <= 5, "one for the first token, each value, and where two tokens begin alike"
    assert len(token_ids) > 3 * num_steps


def test_they_are_not_counted_as_prompts(plain: LLM) -> None:
    def count() -> int:
        return next(metric.value for metric in plain.get_metrics() if metric.name == "vllm:prompt_tokens")

    before, num_prompt_tokens = count(), sum(len(plain.get_tokenizer().encode(prompt)) for prompt in PROMPTS)
    plain.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert count() - before == num_prompt_tokens


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 0},
        {"bad_words": ["zzzz"]},
        {"logits_processors": [lambda logits, token_ids: logits]},
        {"allowed_token_ids": list(range(8000))},
        {"min_tokens": 60, "max_tokens": 60},
    ],
    ids=lambda more: next(iter(more)),
)
def test_not_where_something_else_decides_too(plain: LLM, more: dict[str, Any]) -> None:
    outputs, num_steps = run(plain, [evolve(GREEDY, **{"max_tokens": 8, **more})] * 5)
    assert num_steps == sum(len(token_ids) for token_ids, *_ in outputs)


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_max_tokens_holds(plain: LLM, most: int) -> None:
    token_ids, _ = steps_of(plain, GREEDY)
    assert steps_of(plain, evolve(GREEDY, max_tokens=most))[0] == token_ids[:most]


def test_stop_strings_end_the_output_among_forced_tokens(plain: LLM) -> None:
    outputs, _ = run(plain, [evolve(GREEDY, stop=["second"])] * 5)
    assert {(text.endswith('"'), reason) for _, reason, text in outputs} == {(True, "stop")}


def test_requests_of_one_batch_and_preempted_ones() -> None:
    with LLM("tiny", **SETTINGS) as roomy:
        expected = run(roomy, [GREEDY] * 5)[0]
    with LLM("tiny", num_kv_blocks=5, max_model_len=80, **SETTINGS) as small:
        preempted = []
        small.engine._step_finished = lambda report: preempted.append(report.num_preempted)
        assert run(small, [GREEDY] * 5)[0] == expected
    assert sum(preempted) > 0
