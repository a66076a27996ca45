"""Wrong requests get an answer in OpenAI's shape with a 4xx status, and leave the engine as it was."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from nightly import IS_NIGHTLY
from running_server import Running

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PREDICTION = {"type": "content", "content": "x = 1"}
MESSAGES = [{"role": "user", "content": "text"}]
TOOL = {"type": "function", "function": {"name": "f"}}
NUM_MALFORMED = 10_000 if IS_NIGHTLY else 1000


def error_in(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


WRONG: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (COMPLETIONS, {"prompt": "x", "model": "other"}, 404, "model", "the server has 'tiny'"),
    (COMPLETIONS, {"prompt": "x", "temprature": 1}, 400, None, "did you mean 'temperature'?"),
    (COMPLETIONS, {"prompt": "x", "temperature": 101}, 400, "temperature", "out of range"),
    (COMPLETIONS, {"prompt": "x", "top_p": "a"}, 400, "top_p", "is text, not a number"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "is too small"),
    (COMPLETIONS, {"prompt": "x", "n": 2, "temperature": 0}, 400, "n", "would all be the same"),
    (COMPLETIONS, {"prompt": "x", "n": 16000}, 400, "n", "send several requests"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, 400, "logprobs", "from 0 to 20"),
    (COMPLETIONS, {"prompt": "x", "logprobs": -1}, 400, "logprobs", "from 0 to 20"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "are not streamed"),
    (COMPLETIONS, {"prompt": "x", "logits_processors": []}, 400, None, "has no key 'logits_processors'"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "suffix", "is not supported yet"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, 400, "best_of", "give 1"),
    (COMPLETIONS, {"prompt": "x", "store": True}, 400, "store", "give False"),
    (COMPLETIONS, {"prompt": "x", "stream": 1}, 400, "stream", "must be True or False"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {}}, 400, "stream_options", "are for streams"),
    (COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": 1}, 400, "stream_options", "must be an object"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", "must be a dict from token ids"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"99999999": 1}}, 400, "logit_bias", "are not in the vocabulary"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {}}, 400, "structured_outputs", "give exactly one of"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "("}}, 400, "structured_outputs", "unclosed group"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": 1}, 400, "structured_outputs", "or a dict, such as"),
    (COMPLETIONS, {"prompt": "x", "response_format": {"type": "xml"}}, 400, "response_format", "is not known"),
    (COMPLETIONS, {"prompt": "x", "response_format": [1]}, 400, "response_format", "is not known"),
    (COMPLETIONS, {"prompt": "x", "response_format": {"type": "text", "x": 1}}, 400, "response_format", "no key 'x'"),
    (CHATS, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, 400, "response_format", "no schema"),
    (
        CHATS,
        {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}},
        400,
        None,
        "Invalid type: wat",
    ),
    (
        COMPLETIONS,
        {"prompt": "x", "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        400,
        "response_format",
        "are both given",
    ),
    (COMPLETIONS, {"prompt": "x", "speculative": 1}, 400, "speculative", "must be an object"),
    (COMPLETIONS, {"prompt": "x", "speculative": {"tokens": 1}}, 400, "speculative", "has no key 'tokens'"),
    (COMPLETIONS, {"prompt": "x", "speculative": {"num_tokens": 9}}, 400, "speculative", "the server drafts 4 at most"),
    (COMPLETIONS, {"prompt": "x", "speculative": {"method": "eagle"}}, 400, "speculative", "started with 'ngram'"),
    (COMPLETIONS, {"prompt": "x", "speculative": {"enabled": False, "num_tokens": 1}}, 400, "speculative", "leave out"),
    (COMPLETIONS, {}, 400, "prompt", "must be a text, a list of token ids"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "has no tokens"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "must be a text"),
    (COMPLETIONS, {"prompt": [True]}, 400, "prompt", "must be a text"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt", "not in the vocabulary"),
    (COMPLETIONS, {"prompt": ["a", [10**9]]}, 400, "prompt", "not in the vocabulary"),
    (COMPLETIONS, {"prompt": "\ud800"}, 400, "prompt", "half of a pair"),
    (COMPLETIONS, {"prompt": [1] * 512}, 400, None, "max_model_len=512"),
    (CHATS, {}, 400, "messages", "must be a list of one or more objects"),
    (CHATS, {"messages": [{"content": "x"}]}, 400, "messages", "are not a conversation"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "models here read text"),
    (CHATS, {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs=true"),
    (CHATS, {"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 3}, 400, "max_tokens", "differ"),
    (CHATS, {"messages": MESSAGES, "tools": 3}, 400, "tools", "must be a list"),
    (CHATS, {"messages": MESSAGES, "tools": [{}]}, 400, "tools", "'type': 'function'"),
    (CHATS, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}, 400, "tool_choice", "'auto' or 'none'"),
    (CHATS, {"messages": MESSAGES, "prediction": {"type": "content"}}, 400, "prediction", "must be {'type': 'content'"),
    (CHATS, {"messages": MESSAGES, "prediction": PREDICTION}, 400, "prediction", "none of the engine's methods"),
    (COMPLETIONS, {"prompt": "x", "prediction": "\ud800"}, 400, "prediction", "half of a pair"),
    (CHATS, {"messages": MESSAGES, "parallel_tool_calls": False}, 400, "parallel_tool_calls", "give True"),
    (CHATS, {"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs", "names tools"),
    ("/tokenize", {}, 400, None, "give one of prompt and messages"),
    ("/tokenize", {"prompt": "x", "other": 1}, 400, None, "has no key 'other'"),
    ("/detokenize", {"tokens": [10**9]}, 400, "tokens", "token ids from 0 to"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens", "must be a list of token ids"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_fields(server: Running, path: str, body: dict, status: int, param: str | None, message: str) -> None:
    response = server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    error = error_in(response)
    assert (response.status_code, error["param"]) == (status, param), error
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_fields_that_change_nothing(server: Running) -> None:
    idle = {
        "user": "a",
        "safety_identifier": "a",
        "prompt_cache_key": "a",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "best_of": 1,
        "response_format": {"type": "text"},
        "stop": None,
        "logit_bias": None,
        "priority": 0,
    }
    body = {"prompt": "def mean(", "temperature": 0, "max_tokens": 4}
    assert server.complete(**body, **idle)["choices"] == server.complete(**body)["choices"]
    chat = {
        "messages": MESSAGES,
        "max_tokens": 1,
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "prediction": None,
    }
    assert server.post(CHATS, **chat).status_code == 200


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {"content-type": "application/json"}, 400),
        (b"", {"content-type": "application/json"}, 400),
        (b"[1]", {"content-type": "application/json"}, 400),
        (b'{"prompt": "x", "temperature": NaN}', {"content-type": "application/json"}, 400),
        (b'{"prompt": "\xff"}', {"content-type": "application/json"}, 400),
        (b"[" * 100_000, {"content-type": "application/json"}, 400),
        (b'{"n": ' + b"9" * 5000 + b"}", {"content-type": "application/json"}, 400),
        (b'{"prompt": "x"}', {"content-type": "text/plain"}, 415),
        (b'{"prompt": "x"}', {}, 415),
    ],
    ids=lambda x: str(x)[:30],
)
def test_bodies_that_are_no_json_objects(server: Running, content: bytes, headers: dict, status: int) -> None:
    response = server.http.post(COMPLETIONS, content=content, headers=headers)
    assert (response.status_code, bool(error_in(response))) == (status, True)


def test_addresses_and_methods(server: Running) -> None:
    assert "/v1/nothing" in error_in(server.http.get("/v1/nothing"))["message"]
    assert server.http.get("/v1/nothing").status_code == 404
    assert server.http.get(COMPLETIONS).status_code == 405
    assert server.http.get("/v1/models/other").status_code == 404
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        server.openai.completions.create(model="other", prompt="x")


def test_limits(serve: Callable[..., Running]) -> None:
    started = serve(max_body_bytes=200, max_prompt_tokens=4)
    assert started.post(COMPLETIONS, prompt="x" * 300).status_code == 413
    response = started.post(COMPLETIONS, prompt=[1, 2, 3, 4, 5])
    assert (response.status_code, error_in(response)["code"]) == (400, "context_length_exceeded")
    assert started.post(COMPLETIONS, prompt=[1, 2, 3, 4], max_tokens=1).status_code == 200


def test_keys(serve: Callable[..., Running]) -> None:
    started = serve(api_keys=("secret", "other"))
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic secret"},
        {"authorization": "secret"},
    ):
        response = started.http.get("/v1/models", headers=headers)
        assert (response.status_code, error_in(response)["code"]) == (401, "invalid_api_key")
    assert started.http.post("/tokenize").status_code == 401
    for key in ("secret", "other"):
        assert started.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert [started.http.get(path).status_code for path in ("/health", "/metrics", "/load", "/version")] == [200] * 4


def test_web_pages(server: Running, serve: Callable[..., Running]) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in server.http.options(COMPLETIONS, headers=asked).headers
    started = serve(allowed_origins=("https://a.example",))
    allowed = started.http.options(COMPLETIONS, headers=asked)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://a.example")
    refused = started.http.options(COMPLETIONS, headers={**asked, "origin": "https://b.example"})
    assert "access-control-allow-origin" not in refused.headers


SAMPLES: dict[str, list[Any]] = {
    "numbers": [-1, 0, 1.5, 10**30, -(10**30), 1e308, True],
    "texts": ["", "x", "\ud800", "\x00", "a" * 3000],
    "others": [[], {}, [[]], [[[]]], {"": {}}, [None], [{}], {"type": "text"}, ["x", 1], [-1], [10**9]],
}
FIELDS = [
    *("model", "prompt", "messages", "stream", "stream_options", "n", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("max_tokens", "min_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "echo"),
    *("logit_bias", "bad_words", "allowed_token_ids", "tools", "tool_choice", "speculative", "response_format"),
    "structured_outputs",
    *("chat_template", "chat_template_kwargs", "user", "metadata", "return_token_ids", "cache_salt", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "skip_special_tokens", "add_generation_prompt", "nothing"),
]


def malformed(rng: random.Random) -> bytes:
    """A body that is no valid request: cut, with a field that is unknown, or with a wrong one."""
    body: dict[str, Any] = {"prompt": "x", "messages": MESSAGES}
    for _ in range(rng.randint(1, 4)):
        body[rng.choice(FIELDS)] = rng.choice(SAMPLES[rng.choice([*SAMPLES])])
    body[rng.choice(["top_p", "n", "stream"])] = rng.choice(["wrong", [], {"a": 1}])
    text = json.dumps(body).encode()
    return text[: rng.randrange(len(text))] if rng.random() < 0.3 else text


def test_malformed_bodies(server: Running) -> None:
    expected = server.complete("def mean(", temperature=0, max_tokens=8)["choices"]
    before = {line for line in server.http.get("/metrics").text.splitlines() if "generation_tokens_total{" in line}
    rng = random.Random(0)
    headers = {"content-type": "application/json"}
    for _ in range(NUM_MALFORMED):
        body, path = malformed(rng), rng.choice([COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
        response = server.http.post(path, content=body, headers=headers)
        assert 400 <= response.status_code < 500, (path, body[:300], response.text)
        error_in(response)
    server.wait_until_idle()
    assert before <= {*server.http.get("/metrics").text.splitlines()}, "nothing was generated"
    assert server.complete("def mean(", temperature=0, max_tokens=8)["choices"] == expected
