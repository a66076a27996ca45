"""A small request cannot keep the server busy: what asks for too much is refused at once, and slow bodies end."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest
from running_server import WAIT_S, Running, wait_for

from specdec_server import generation, lifecycle, limits

FIELDS = {"prompt": "def mean(", "max_tokens": 2, "temperature": 1}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("n", 129, "n=129 is more than 128"),
        ("bad_words", ["a"] * 1001, "bad_words has 1001 texts"),
        ("bad_words", ["a" * 1001], "of up to 1001 characters: give 1000 at most"),
        ("stop", ["a"] * 1001, "stop has 1001 texts"),
        ("structured_outputs", {"choice": [f"w{i}" for i in range(1001)]}, "structured_outputs has 1001 texts"),
    ],
)
def test_too_much_is_refused(server: Running, field: str, value: Any, says: str) -> None:
    response = server.post("/v1/completions", **FIELDS | {field: value})
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == field


def test_too_many_logprobs(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_LOGPROBS_OF_ANSWER", 2 * 3 * 4 * 6)
    given = FIELDS | {"prompt": ["a", "b"], "n": 3, "max_tokens": 4}
    assert server.post("/v1/completions", **given, logprobs=5).status_code == 200
    refused = server.post("/v1/completions", **given, logprobs=6).json()["error"]
    assert refused["message"].startswith("logprobs of up to 24 tokens, 7 of each")
    assert server.post("/v1/completions", **given | {"max_tokens": 5}, logprobs=5).status_code == 400


def test_too_many_prompt_logprobs(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_LOGPROBS_OF_ANSWER", 12)
    given = FIELDS | {"prompt": [[1, 2, 3], [4]]}
    assert server.post("/v1/completions", **given, prompt_logprobs=2).status_code == 200
    refused = server.post("/v1/completions", **given, prompt_logprobs=3).json()["error"]
    assert refused["message"].startswith("prompt_logprobs of 4 tokens, 4 of each")
    assert refused["param"] == "prompt_logprobs"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_texts_that_are_too_long_are_not_tokenized(server: Running, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    service = server.app.state.service  # type: ignore[attr-defined]
    most = service._longest_text._most_characters
    monkeypatch.setattr(service._threads, "submit", lambda *given: pytest.fail("it was tokenized"))
    text = " a" * (most // 2 + 1)
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    error = server.post(path, **body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"has {len(text) + 4 * ('chat' in path)} characters" in error["message"]


def test_a_long_prompt_holds_up_no_other(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, tokenize = Event(), server.llm.tokenize

    def slow_tokenize(prompt: Any, **given: Any) -> Any:
        assert prompt["prompt"] != "long" or is_over.wait(WAIT_S)
        return tokenize(prompt, **given)

    monkeypatch.setattr(server.llm, "tokenize", slow_tokenize)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.post, "/v1/completions", **FIELDS | {"prompt": "long"})
        wait_for(lambda: server.http.get("/load").json() == {"server_load": 1})
        assert server.post("/v1/completions", **FIELDS).status_code == 200
        assert not pending.done()
        is_over.set()
        assert pending.result().status_code == 200


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"logprobs": 1, "echo": True, "stream": True}], ids=str)
def test_a_large_answer_holds_up_no_other(server: Running, monkeypatch: pytest.MonkeyPatch, fields: dict) -> None:
    is_over, write = Event(), generation.dumps_in_parts

    def slow_write(value: Any) -> bytes:
        assert is_over.wait(WAIT_S)
        return write(value)

    expected = server.post("/v1/completions", **FIELDS | fields, seed=1).text
    monkeypatch.setattr(generation, "dumps_in_parts", slow_write)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.post, "/v1/completions", **FIELDS | fields, seed=1)
        wait_for(lambda: server.http.get("/load").json() == {"server_load": 1})
        assert server.post("/v1/completions", **FIELDS).status_code == 200
        assert not pending.done()
        is_over.set()
        found = pending.result().text
    cut = [re.sub(r'"id":"[^"]*"|"created":\d+', "", each) for each in (found, expected)]
    assert cut[0] == cut[1]


def test_prompts_of_a_client_that_left_are_not_tokenized(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, tokenize, given = Event(), server.llm.tokenize, []

    def slow_tokenize(prompt: Any, **keywords: Any) -> Any:
        given.append(prompt["prompt"])
        assert is_over.wait(WAIT_S)
        return tokenize(prompt, **keywords)

    monkeypatch.setattr(server.llm, "tokenize", slow_tokenize)
    body = FIELDS | {"prompt": [str(i) for i in range(100)]}
    with httpx.Client(base_url=server.url, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body, timeout=httpx.Timeout(WAIT_S, read=0.1))
    wait_for(lambda: server.http.get("/load").json() == {"server_load": 0})
    is_over.set()
    pool = server.app.state.service._threads
    wait_for(lambda: pool._idle_semaphore._value == len(pool._threads))
    assert given == ["0"]


def half_sent(server: Running) -> socket.socket:
    """A connection whose request's body does not come to its end."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    connection.sendall(head.encode())
    return connection


def test_a_body_that_does_not_come_to_its_end(serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "BODY_TIMEOUT_S", 0.1)
    with half_sent(serve()) as connection:
        assert b" 408 " in connection.recv(4096).partition(b"\r\n")[0]


def test_a_server_that_ends_does_not_wait_for_a_body(serve: Callable[..., Running]) -> None:
    started = serve()
    with half_sent(started) as connection:
        time.sleep(0.2)
        started.server.should_exit = True
        assert b" 503 " in connection.recv(4096).partition(b"\r\n")[0]
        started._thread.join(lifecycle.BODY_TIMEOUT_S / 2)
        assert not started._thread.is_alive()
