"""An engine that hangs, or whose thread ends: /health says so, and no request waits for ever."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import httpx
import pytest
from running_server import ENGINE, WAIT_S, Running, last_event, read_until, serving, wait_for

from specdec_core import AsyncLLM, SpecdecError
from specdec_server import watchdog

BODY = {"prompt": "def mean(values):\n", "max_tokens": 300, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "ignore_eos": True}
TIMEOUT_S = 2.0
"""Much longer than any step but those that hang."""


@pytest.fixture
def started() -> Iterator[Running]:
    running = Running(AsyncLLM("tiny", **ENGINE), step_timeout_s=TIMEOUT_S)
    yield running
    running.stop()
    asyncio.run(running.llm.shutdown())


@contextmanager
def hanging(llm: AsyncLLM, step: str = "step") -> Iterator[Event]:
    """A context in which the engine's next step hangs, until the event is set or the context ends."""
    is_over, before = Event(), getattr(llm._session, step)

    def hang() -> None:
        is_over.wait(WAIT_S)
        before()

    setattr(llm._session, step, hang)
    try:
        yield is_over
    finally:
        delattr(llm._session, step)
        is_over.set()


def send_four(started: Running, pool: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """Send whole and streamed requests to both endpoints."""
    return [
        pool.submit(started.post, path, **body, stream=is_streamed)
        for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT))
        for is_streamed in (False, True)
    ]


def errors_of(answers: list[httpx.Response], status: int) -> list[dict[str, Any]]:
    """The error of each answer, which has this status or is a stream that had begun."""
    bodies = [each.json() if each.status_code == status else last_event(each.text) for each in answers]
    return [body["error"] for body in bodies]


def test_a_step_that_hangs(started: Running, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(4) as pool, hanging(started.llm) as is_over:
        running = send_four(started, pool)
        found = errors_of([each.result() for each in running], 503)
        health = started.http.get("/health")
        later = [each.result() for each in send_four(started, pool)]
        assert {each.status_code for each in [health, *later, started.http.get("/metrics")]} == {503}
        for error in [*found, *errors_of([health, *later], 503)]:
            assert (error["code"], error["type"], error["param"]) == ("engine_stuck", "server_error", None)
            assert "a step takes longer than 2 s" in error["message"]
        assert not is_over.is_set(), "it hangs still"
        assert "is_over.wait(WAIT_S)" in caplog.text, "the log says where"
    wait_for(lambda: started.http.get("/health").status_code == 200)
    started.wait_until_idle()
    assert started.complete("def mean(", max_tokens=4)["choices"][0]["finish_reason"] == "length"


def test_a_stream_that_had_begun(started: Running) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        started.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        with hanging(started.llm):
            rest = pool.submit(lambda: "\n".join(lines)).result(WAIT_S)
            assert last_event(rest.replace("\n\n", "\n").replace("\n", "\n\n"))["error"]["code"] == "engine_stuck"


def test_steps_are_not_taken_together(started: Running) -> None:
    """Many steps may take longer than one may. So may the time between two of them."""
    step = started.llm._session.step

    def slow_step() -> None:
        time.sleep(TIMEOUT_S / 8)
        step()

    started.llm._session.step = slow_step  # type: ignore[method-assign]
    body = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "speculative": {"enabled": False}}
    assert len(started.complete("def mean(", **body)["choices"][0]["token_ids"]) == 12
    time.sleep(TIMEOUT_S * 1.2)
    assert started.http.get("/health").status_code == 200


def test_zero_is_any_time(serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LEAST_S", 0.2)
    started = serve(step_timeout_s=0)
    with ThreadPoolExecutor(1) as pool, hanging(started.llm) as is_over:
        pending = pool.submit(started.post, "/v1/completions", prompt="x", max_tokens=2)
        time.sleep(0.6)
        assert started.http.get("/health").status_code == 200
        is_over.set()
        assert pending.result().status_code == 200


def test_the_default_is_larger_on_a_slow_machine(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < llm.engine.longest_step_s < 1
    assert watchdog.step_timeout_of(llm, None) == 30
    monkeypatch.setattr(llm.engine, "longest_step_s", 12.0)
    assert watchdog.step_timeout_of(llm, None) == 120
    assert watchdog.step_timeout_of(llm, 5.0) == 5


def test_a_process_that_was_stopped_does_not_hang(started: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog counts only time in which it ran itself."""
    service = started.app.state.service
    made = watchdog.Watchdog(started.llm, service.lifecycle, 10.0)
    now = made._last_s
    monkeypatch.setattr(AsyncLLM, "progress", 1)
    looks = []
    for passed_s in (0.5, 3600, *[0.5] * 20):
        now += passed_s
        monkeypatch.setattr(watchdog, "monotonic", lambda now=now: now)
        looks.append(made.look())
    assert looks.index(True) == 20


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), SystemExit(3)], ids=repr)
def test_a_step_that_raises(started: Running, error: BaseException) -> None:
    """The requests of the step fail, and the server goes on."""
    step = started.llm.engine._step

    def fail() -> None:
        started.llm.engine._step = step  # type: ignore[method-assign]
        raise error

    started.llm.engine._step = fail  # type: ignore[method-assign]
    failed = started.post("/v1/completions", **BODY)
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    assert started.http.get("/health").status_code == 200
    assert started.complete("def mean(", max_tokens=4)["choices"][0]["finish_reason"] == "length"


def test_a_thread_that_ends(started: Running) -> None:
    """An error of the engine's thread itself is the end of the engine: whatever waits and comes gets it."""
    with ThreadPoolExecutor(4) as pool:
        with hanging(started.llm):
            running = send_four(started, pool)
            wait_for(lambda: started.app.state.service.lifecycle._num_completions == 4)

            def fail(work: Callable[[], None]) -> None:
                raise SystemExit("the thread was ended")

            started.llm._attempt = fail  # type: ignore[method-assign]
        answers = [each.result() for each in running]
        later = [each.result() for each in send_four(started, pool)]
        health = started.http.get("/health")
    assert (health.status_code, {each.status_code for each in later}) == (503, {500})
    for error in [*errors_of(answers, 500), *errors_of(later, 500), health.json()["error"]]:
        assert error["code"] == "engine_dead"
        assert "the engine's thread ended by SystemExit: the thread was ended" in error["message"]
    assert started.http.get("/metrics").status_code == 200
    assert not started.llm.is_healthy
    with pytest.raises(SpecdecError, match="restart the process"):
        asyncio.run(anext(started.llm.generate("x")))


def test_a_process_that_hangs_ends_all_the_same() -> None:
    before = "import time\nfrom specdec_core.engine.engine import Engine\nEngine._step = lambda engine: time.sleep(600)"
    with serving("--step-timeout", "0.5", "--drain-timeout", "0.5", before=before) as (process, client):
        answer = client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stuck")
        process.send_signal(signal.SIGTERM)
        assert read_until(process, "error: the engine hangs")
        assert process.wait(WAIT_S) == 1
