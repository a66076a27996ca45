"""The end of a server or of its engine: every request is answered, and with a reason if it fails."""

from __future__ import annotations

import asyncio
import json
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from running_server import ENGINE, WAIT_S, Running, last_event, limited, serving, wait_for

from specdec_core import AsyncLLM, PluginWarning

PROMPTS = [f"def function_{i}(value):\n    return value + {i}\n\n\ndef function_{i + 1}(" for i in range(4)]
ASSERT = "CUDA error: device-side assert triggered"


@pytest.fixture
def started() -> Iterator[Running]:
    running = Running(AsyncLLM("tiny", **ENGINE), drain_timeout_s=0.3)
    yield running
    running.stop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        asyncio.run(running.llm.shutdown())


def test_a_dead_engine(started: Running) -> None:
    """A device that failed for good ends running requests and those to come, with the device's error."""

    def fail() -> None:
        raise torch.AcceleratorError(ASSERT)

    with ThreadPoolExecutor(4) as pool:
        with limited(started.llm, 2):
            body = {"prompt": PROMPTS[0], "max_tokens": 300, "ignore_eos": True}
            whole = [pool.submit(started.post, "/v1/completions", **body) for _ in range(2)]
            streams = [pool.submit(started.post, "/v1/completions", **body, stream=True) for _ in range(2)]
            wait_for(lambda: started.app.state.service.lifecycle._num_completions == 4)
            wait_for(lambda: len(started.llm.engine._requests) == 4)
            started.llm.engine._step = fail  # type: ignore[method-assign]
        answers = [each.result() for each in [*whole, *streams]]
    bodies = [each.json() if each.status_code == 500 else last_event(each.text) for each in answers]
    chat = {"messages": [{"role": "user", "content": "x"}]}
    later = [
        started.http.get("/health"),
        started.post("/v1/completions", **body),
        started.post("/v1/completions", **body, stream=True),
        started.post("/v1/chat/completions", **chat),
        started.post("/tokenize", prompt="x"),
    ]
    assert [each.status_code for each in later] == [503, *[500] * 4]
    for found in [*bodies, *(each.json() for each in later)]:
        assert (found["error"]["code"], found["error"]["type"]) == ("engine_dead", "server_error")
        assert ASSERT in found["error"]["message"]
        assert "restart the process" in found["error"]["message"]
    assert started.http.get("/metrics").status_code == 200


def test_a_step_that_fails(started: Running) -> None:
    """A plugin's error ends the requests of its step; the engine goes on."""
    expected = started.complete(PROMPTS[0], temperature=0, max_tokens=8)["choices"]
    step = started.llm.engine._step

    def fail() -> None:
        started.llm.engine._step = step  # type: ignore[method-assign]
        raise ZeroDivisionError("a bug in a plugin")

    started.llm.engine._step = fail  # type: ignore[method-assign]
    failed = started.post("/v1/completions", prompt=PROMPTS[0], max_tokens=8)
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    assert started.complete(PROMPTS[0], temperature=0, max_tokens=8)["choices"] == expected
    assert started.http.get("/health").status_code == 200


def test_requests_finish_while_the_server_drains(started: Running) -> None:
    lifecycle = started.app.state.service.lifecycle
    lifecycle._drain_timeout_s = WAIT_S
    with ThreadPoolExecutor(2) as pool:
        with limited(started.llm, 2):
            body = {"prompt": PROMPTS[0], "max_tokens": 40, "ignore_eos": True}
            whole = pool.submit(started.post, "/v1/completions", **body)
            streamed = pool.submit(started.post, "/v1/completions", **body, stream=True)
            wait_for(lambda: lifecycle._num_completions == 2)
            started.server.should_exit = True
            wait_for(lambda: lifecycle.is_draining)
        assert whole.result().json()["choices"][0]["finish_reason"] == "length"
        assert last_event(streamed.result().text)["choices"][0]["finish_reason"] == "length"
    started.wait_until_idle()


def test_requests_that_take_too_long_fail_when_the_server_drains(started: Running) -> None:
    lifecycle = started.app.state.service.lifecycle
    with ThreadPoolExecutor(2) as pool, limited(started.llm, 2):
        body = {"prompt": PROMPTS[0], "max_tokens": 40, "ignore_eos": True}
        whole = pool.submit(started.post, "/v1/completions", **body)
        streamed = pool.submit(started.post, "/v1/completions", **body, stream=True)
        wait_for(lambda: lifecycle._num_completions == 2)
        wait_for(lambda: len(started.llm.engine._requests) == 2)
        started.server.should_exit = True
        answers = [whole.result(), streamed.result()]
        found = [each.json() if each.status_code == 503 else last_event(each.text) for each in answers]
        assert [each["error"]["code"] for each in found] == ["shutting_down"] * 2
        started.wait_until_idle()


def test_a_draining_server_admits_nothing(started: Running) -> None:
    started.app.state.service.lifecycle.is_draining = True
    refused = [started.http.get("/health"), started.post("/v1/completions", prompt="x")]
    assert [(each.status_code, each.json()["error"]["code"]) for each in refused] == [(503, "shutting_down")] * 2


def test_sigterm_under_load() -> None:
    """The process ends by itself, and each request has finished or failed with a reason."""
    arguments = ["--drain-timeout", "0.5", "--method", "ngram", "--engine", "max_num_seqs=16"]
    with serving(*arguments) as (process, client), ThreadPoolExecutor(12) as pool:

        def request(index: int) -> str:
            most = 30 if index % 3 == 0 else 2000
            body = {"prompt": PROMPTS[index % 4], "max_tokens": most, "ignore_eos": True, "stream": index % 2 == 0}
            answer = client.post("/v1/completions", json=body)
            found = answer.json() if index % 2 or answer.status_code == 503 else last_event(answer.text)
            return found["error"]["code"] if "error" in found else found["choices"][0]["finish_reason"]

        pending = [pool.submit(request, index) for index in range(12)]
        wait_for(lambda: client.get("/load").json()["server_load"] >= 8 or any(each.done() for each in pending))
        process.send_signal(signal.SIGTERM)
        outcomes = [each.result() for each in pending]
        assert {*outcomes} <= {"length", "shutting_down"}
        assert process.wait(WAIT_S) == 0
        lines = [line for line in process.stderr or () if line.startswith("{")]
        assert {json.loads(line)["path"] for line in lines} <= {"/v1/completions", "/load"}
        assert len(lines) >= 12


SLOW_STEPS = """
import time
from specdec_core.engine.engine import Engine
step = Engine._step
Engine._step = lambda engine: (time.sleep(0.05), step(engine))[1]
"""


def takes_connections(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_second_interrupt_ends_the_requests() -> None:
    """They get an answer with the reason, before their time to drain is over."""
    arguments = ["--drain-timeout", str(10 * WAIT_S)]
    with serving(*arguments, before=SLOW_STEPS) as (process, client), ThreadPoolExecutor(1) as pool:
        body = {"prompt": PROMPTS[0], "max_tokens": 2000, "ignore_eos": True}
        pending = pool.submit(client.post, "/v1/completions", json=body)
        wait_for(lambda: client.get("/load").json() == {"server_load": 1})
        process.send_signal(signal.SIGINT)
        wait_for(lambda: not takes_connections(client))
        process.send_signal(signal.SIGINT)
        answer = pending.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert process.wait(WAIT_S) == 130
