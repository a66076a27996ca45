"""/v1/chat/completions, with httpx and with the openai package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from chain_model import save_chains
from running_server import ENGINE, TEMPLATE, Running

from specdec_core import LLM, AsyncLLM, SamplingParams

MESSAGES: Any = [{"role": "user", "content": "def mean(values):\n    return"}]
TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


def answer(reference: LLM, messages: Any = MESSAGES, **params: Any) -> Any:
    (output,) = reference.chat(messages, SamplingParams(**params), chat_template=TEMPLATE, use_tqdm=False)
    return output


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.7, "seed": 3}], ids=str)
def test_answers_are_those_of_llm(server: Running, reference: LLM, params: dict) -> None:
    expected = answer(reference, **params, max_tokens=20).outputs[0]
    create: Any = server.openai.chat.completions.create
    found = create(model="tiny", messages=MESSAGES, max_completion_tokens=20, **params)
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == (expected.text, "length")
    assert found.usage.completion_tokens == 20
    chunks = [*create(model="tiny", messages=MESSAGES, max_tokens=20, stream=True, **params)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]


def test_content_parts_and_earlier_calls(server: Running) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    body = {"temperature": 0, "max_tokens": 8}
    texts = [
        server.post("/v1/chat/completions", messages=messages, **body).json()["choices"][0]["message"]["content"]
        for messages in (MESSAGES, parts)
    ]
    assert texts[0] == texts[1]
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    spoken = [{"role": "assistant", "content": None, "tool_calls": calls}]
    counted = server.post("/tokenize", messages=[*spoken, *MESSAGES]).json()["count"]
    assert counted == server.post("/tokenize", prompt=MESSAGES[0]["content"], add_special_tokens=False).json()["count"]


def test_arguments_of_earlier_calls_are_objects_for_templates(serve: Callable[..., Running]) -> None:
    template = "{% for call in messages[0].tool_calls %}{{ call.function.arguments.x }}{% endfor %}"
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "def mean"}'}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    started = serve(chat_template=template)
    tokens = started.post("/tokenize", messages=messages).json()["tokens"]
    assert started.post("/detokenize", tokens=tokens).json() == {"prompt": "def mean"}


def test_logprobs(server: Running, reference: LLM) -> None:
    expected = answer(reference, temperature=1.5, seed=1, max_tokens=8, logprobs=2).outputs[0]
    assert any(each[token_id].rank > 1 for token_id, each in zip(expected.token_ids, expected.logprobs, strict=True))
    create: Any = server.openai.chat.completions.create
    arguments = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 1.5, "seed": 1}
    arguments["logprobs"] = True
    whole = create(**arguments, top_logprobs=2).choices[0].logprobs.content
    streamed = [
        each for chunk in create(**arguments, top_logprobs=2, stream=True) for each in chunk.choices[0].logprobs.content
    ]
    for found in (whole, streamed):
        assert [each.token for each in found] == [
            logprobs[token_id].decoded_token
            for token_id, logprobs in zip(expected.token_ids, expected.logprobs, strict=True)
        ]
        assert [each.logprob for each in found] == pytest.approx(
            [each[token_id].logprob for token_id, each in zip(expected.token_ids, expected.logprobs, strict=True)],
            abs=1e-5,
        )
        assert all(len(each.top_logprobs) == 2 for each in found)
        likely = [sorted(each.values(), key=lambda one: -one.logprob)[:2] for each in expected.logprobs]
        assert [[one.token for one in each.top_logprobs] for each in found] == [
            [one.decoded_token for one in each] for each in likely
        ]
        assert all(bytes(each.bytes).decode() == each.token for each in found if each.bytes is not None)
    assert create(**arguments).choices[0].logprobs.content[0].top_logprobs == []


def test_several_answers_and_stops(server: Running, reference: LLM) -> None:
    expected = answer(reference, n=2, seed=7, max_tokens=12, stop=["\n"]).outputs
    create: Any = server.openai.chat.completions.create
    arguments = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "n": 2, "seed": 7, "stop": ["\n"]}
    found = create(**arguments)
    assert [choice.message.content for choice in found.choices] == [each.text for each in expected]
    assert [choice.finish_reason for choice in found.choices] == [each.finish_reason for each in expected]
    texts = ["", ""]
    for chunk in create(**arguments, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [each.text for each in expected]


def test_token_ids_and_prompt_logprobs(server: Running, reference: LLM) -> None:
    expected = answer(reference, temperature=0, max_tokens=5, prompt_logprobs=0)
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 5, "return_token_ids": True}
    found = server.post("/v1/chat/completions", **body, prompt_logprobs=0).json()
    assert found["prompt_token_ids"] == expected.prompt_token_ids
    assert found["choices"][0]["token_ids"] == expected.outputs[0].token_ids
    assert len(found["prompt_logprobs"]) == len(expected.prompt_token_ids)
    with server.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert chunks[0]["prompt_token_ids"] == expected.prompt_token_ids
    assert [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]] == found["choices"][0][
        "token_ids"
    ]


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    """An engine that writes a text with two calls in Hermes' format after "hermes", and in Llama 3's after "llama"."""
    hermes = [
        "hermes",
        "I look it",
        " up.\n\n<tool",
        '_call>{"name": ',
        '"look_up", "argum',
        'ents": {"name": "mean"}}</tool_call>\n<',
    ]
    hermes += ["tool_call>", '{"name": "stop", "arguments": {}}', "</tool_call>"]
    llama = ["llama", '{"name": "look_up", "para', 'meters": {"name": "mean"}}; {"na', 'me": "stop", "parameters": {}}']
    special = ["special", "<tool_call>", '{"name": "special", "arguments": {}}', "</tool_call> "]
    cut = ["cut", "I look ", "it up <tool", "_call> {"]
    folder = save_chains(tmp_path_factory.mktemp("chains"), [hermes, llama, special, cut], special=["<tool_call>"])
    made = AsyncLLM(folder, **ENGINE)
    yield made
    asyncio.run(made.shutdown())


@pytest.mark.parametrize(("name", "content"), [("hermes", "I look it up."), ("llama3_json", None)])
def test_tool_calls(chains: AsyncLLM, serve: Callable[..., Running], name: str, content: str | None) -> None:
    started = serve(chains, tool_call_parser=name, chat_template="{{ messages[0].content }}")
    create: Any = started.openai.chat.completions.create
    messages = [{"role": "user", "content": name.partition("3")[0]}]
    arguments = {"model": "tiny", "messages": messages, "temperature": 0, "tools": [TOOL]}
    found = create(**arguments).choices[0]
    expected = [("look_up", {"name": "mean"}), ("stop", {})]
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.message.tool_calls]
    assert (calls, found.finish_reason, found.message.content) == (expected, "tool_calls", content)
    chunks = [*create(**arguments, stream=True)]
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(each.function.name, json.loads(each.function.arguments)) for each in deltas] == expected
    assert [each.index for each in deltas] == [0, 1]
    assert len({each.id for each in deltas}) == 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (content or "")
    plain = create(**arguments, tool_choice="none").choices[0]
    assert (plain.message.tool_calls, plain.finish_reason) == (None, "stop")
    assert '"look_up"' in plain.message.content


def test_a_marker_that_is_a_special_token(chains: AsyncLLM, serve: Callable[..., Running]) -> None:
    """Special tokens are left out of texts, but not where calls are looked for."""
    started = serve(chains, chat_template="{{ messages[0].content }}")
    create: Any = started.openai.chat.completions.create
    arguments = {"model": "tiny", "messages": [{"role": "user", "content": "special"}], "temperature": 0}
    (call,) = create(**arguments, tools=[TOOL]).choices[0].message.tool_calls
    assert call.function.name == "special"
    assert "<tool_call>" not in create(**arguments).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_content(chains: AsyncLLM, serve: Callable[..., Running], stream: bool) -> None:
    started = serve(chains, chat_template="{{ messages[0].content }}")
    create: Any = started.openai.chat.completions.create
    arguments = {"model": "tiny", "messages": [{"role": "user", "content": "cut"}], "temperature": 0, "tools": [TOOL]}
    if stream:
        chunks = [*create(**arguments, stream=True)]
        content, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        (choice,) = create(**arguments).choices
        content, reason = choice.message.content, choice.finish_reason
    assert (content, reason) == ("I look it up <tool_call> {", "stop")


def test_tools_reach_the_template(server: Running) -> None:
    counts = [server.post("/tokenize", messages=MESSAGES, **tools).json()["count"] for tools in ({}, {"tools": [TOOL]})]
    assert counts[0] < counts[1]


def test_without_a_template_or_a_parser(serve: Callable[..., Running]) -> None:
    started = serve(chat_template=None, tool_call_parser=None)
    with pytest.raises(openai.BadRequestError, match="--chat-template FILE"):
        started.openai.chat.completions.create(model="tiny", messages=MESSAGES)
    started = serve(tool_call_parser=None)
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser hermes or llama3_json"):
        started.openai.chat.completions.create(model="tiny", messages=MESSAGES, tools=[TOOL])


def test_templates_of_requests(server: Running, serve: Callable[..., Running]) -> None:
    body = {"messages": MESSAGES, "chat_template": "{{ messages[0].content }}!"}
    refused = server.post("/tokenize", **body)
    assert (refused.status_code, "--trust-request-chat-template" in refused.text) == (400, True)
    trusting = serve(trust_request_chat_template=True)
    tokens = trusting.post("/tokenize", **body).json()["tokens"]
    assert trusting.post("/detokenize", tokens=tokens).json()["prompt"].endswith("return!")
