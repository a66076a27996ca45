"""/v1/completions, with httpx and with the openai package."""

from __future__ import annotations

import json
from typing import Any

import pytest
from running_server import Running

from specdec_core import LLM, SamplingParams

PROMPTS = [f"def function_{i}(value):\n    return value + {i}\n\n\ndef function_{i + 1}(" for i in range(3)]


def events(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a stream, whose last event is [DONE]."""
    *found, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert last == "data: [DONE]".removeprefix("data: ")
    return [json.loads(each) for each in found]


@pytest.mark.parametrize("speculative", [None, {"enabled": False}, {"num_tokens": 2}, {"method": "ngram"}], ids=str)
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}], ids=str)
def test_outputs_are_those_of_llm(server: Running, reference: LLM, params: dict, speculative: dict | None) -> None:
    outputs = reference.generate(PROMPTS, SamplingParams(**params, max_tokens=24), use_tqdm=False)
    found = server.complete(PROMPTS, **params, max_tokens=24, return_token_ids=True, speculative=speculative)
    assert [choice["token_ids"] for choice in found["choices"]] == [output.outputs[0].token_ids for output in outputs]
    assert [choice["text"] for choice in found["choices"]] == [output.outputs[0].text for output in outputs]
    assert [choice["prompt_token_ids"] for choice in found["choices"]] == [each.prompt_token_ids for each in outputs]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert found["usage"]["completion_tokens"] == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert found["usage"]["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)


def test_the_openai_package(server: Running, reference: LLM) -> None:
    (output,) = reference.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    arguments: Any = {"model": "tiny", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 12}
    found = server.openai.completions.create(**arguments)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (output.outputs[0].text, "length")
    chunks = [*server.openai.completions.create(**arguments, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == output.outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_token_ids_are_prompts(server: Running) -> None:
    token_ids = server.post("/tokenize", prompt=PROMPTS[0]).json()["tokens"]
    texts = [
        server.complete(prompt, temperature=0, max_tokens=8)["choices"][0]["text"]
        for prompt in (PROMPTS[0], token_ids, [token_ids], [PROMPTS[0]])
    ]
    assert len({*texts}) == 1
    mixed = server.complete([token_ids, PROMPTS[0]], temperature=0, max_tokens=8)
    assert [choice["text"] for choice in mixed["choices"]] == texts[:2]


def test_several_completions(server: Running, reference: LLM) -> None:
    params = {"n": 3, "seed": 4, "max_tokens": 8}
    outputs = reference.generate(PROMPTS[:2], SamplingParams(**params), use_tqdm=False)
    expected = [completion.text for output in outputs for completion in output.outputs]
    found = server.complete(PROMPTS[:2], **params)
    assert [choice["text"] for choice in found["choices"]] == expected
    assert found["metrics"] is None
    streamed = [""] * 6
    for event in events(server.post("/v1/completions", prompt=PROMPTS[:2], **params, stream=True).text):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == expected


def test_a_stream_ends_with_usage_and_metrics(server: Running) -> None:
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 40}
    whole = server.complete(**body)
    *chunks, last = events(
        server.post("/v1/completions", **body, stream=True, stream_options={"include_usage": True}).text
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert (last["choices"], last["usage"], last["metrics"]) == ([], whole["usage"], whole["metrics"])
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


def test_the_figures_of_a_request(server: Running, reference: LLM) -> None:
    figures = server.complete(PROMPTS[0], temperature=0, max_tokens=40)["metrics"]["speculative_decoding"]
    histogram, num_drafts = figures["acceptance_histogram"], figures["num_spec_steps"]
    assert num_drafts > 0
    assert len(histogram) == figures["num_spec_tokens"] + 1 == 5
    assert sum(histogram) == num_drafts
    assert sum(i * number for i, number in enumerate(histogram)) == figures["num_accepted_draft_tokens"] > 0
    assert figures["draft_acceptance_rate"] == figures["num_accepted_draft_tokens"] / figures["num_draft_tokens"]
    assert figures["mean_acceptance_length"] == 1 + figures["num_accepted_draft_tokens"] / num_drafts
    off = server.complete(PROMPTS[0], temperature=0, max_tokens=40, speculative={"enabled": False})
    assert off["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    short = server.complete(PROMPTS[0], temperature=0, max_tokens=40, speculative={"num_tokens": 1})
    assert short["metrics"]["speculative_decoding"]["acceptance_histogram"][2:] == [0, 0, 0]
    assert short["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_echo(server: Running, reference: LLM, stream: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=2)
    (output,) = reference.generate(PROMPTS[0], params, use_tqdm=False)
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 6, "logprobs": 2, "echo": True}
    if stream:
        parts = [event["choices"][0] for event in events(server.post("/v1/completions", **body, stream=True).text)]
        found = {name: [x for part in parts for x in part["logprobs"][name]] for name in parts[0]["logprobs"]}
        text = "".join(part["text"] for part in parts)
    else:
        (choice,) = server.complete(**body)["choices"]
        found, text = choice["logprobs"], choice["text"]
    completion = output.outputs[0]
    assert text == PROMPTS[0] + completion.text
    token_ids = [*output.prompt_token_ids, *completion.token_ids]
    logprobs = [*output.prompt_logprobs, *completion.logprobs]
    expected = [each and each[token_id].logprob for token_id, each in zip(token_ids, logprobs, strict=True)]
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(expected[1:], abs=1e-5)
    assert "".join(found["tokens"]) == text
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token
    assert all(2 <= len(each) <= 3 for each in found["top_logprobs"][1:])


def test_each_completion_echoes_the_prompt(server: Running) -> None:
    body = {"prompt": PROMPTS[:2], "n": 2, "seed": 1, "max_tokens": 2, "logprobs": 1, "echo": True}
    choices = server.complete(**body)["choices"]
    for prompt, pair in zip(PROMPTS[:2], (choices[:2], choices[2:]), strict=True):
        assert all(choice["text"].startswith(prompt) for choice in pair)
        assert all("".join(choice["logprobs"]["tokens"]) == choice["text"] for choice in pair)
        assert len({str(choice["logprobs"]["token_logprobs"][:-2]) for choice in pair}) == 1


def test_prompt_logprobs(server: Running, reference: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = reference.generate(PROMPTS[0], params, use_tqdm=False)
    (choice,) = server.complete(PROMPTS[0], temperature=0, max_tokens=1, prompt_logprobs=1)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for found, expected in zip(rest, output.prompt_logprobs[1:], strict=True):
        assert {int(key) for key in found} == {*expected}
        assert [each["rank"] for each in found.values()] == [each.rank for each in expected.values()]


def test_fields_of_sampling(server: Running, reference: LLM) -> None:
    """Fields of SamplingParams reach the engine under their names."""
    token_ids = server.post("/tokenize", prompt="return value").json()["tokens"]
    cases: list[dict[str, Any]] = [
        {"stop": "return"},
        {"stop": ["return"], "include_stop_str_in_output": True},
        {"stop_token_ids": token_ids[:1], "min_tokens": 3},
        {"allowed_token_ids": token_ids},
        {"bad_words": ["value"]},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        {"top_k": 3, "top_p": 0.9, "min_p": 0.01, "temperature": 1.0, "seed": 1},
        {"ignore_eos": True, "skip_special_tokens": False},
    ]
    for case in cases:
        given = {"temperature": 0, "max_tokens": 16, **case}
        (output,) = reference.generate(PROMPTS[0], SamplingParams(**given), use_tqdm=False)
        (choice,) = server.complete(PROMPTS[0], **given)["choices"]
        expected = output.outputs[0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
            expected.text,
            expected.finish_reason,
            expected.stop_reason,
        ), case
    params = SamplingParams(temperature=0, max_tokens=4, logit_bias={token_ids[0]: 100})
    (output,) = reference.generate(PROMPTS[0], params, use_tqdm=False)
    given = {"temperature": 0, "max_tokens": 4, "logit_bias": {str(token_ids[0]): 100}, "return_token_ids": True}
    assert server.complete(PROMPTS[0], **given)["choices"][0]["token_ids"] == output.outputs[0].token_ids
