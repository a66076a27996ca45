"""A real server on a free port of the loopback interface, in a thread of the test process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import httpx
import openai
from attrs import evolve

from specdec_core import AsyncLLM
from specdec_server.app import make_app
from specdec_server.serving import DrainingServer, bound_socket
from specdec_server.settings import Settings

WAIT_S = 60.0
"""A test that waits longer for something fails. Nothing depends on how much shorter it takes."""

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% for tool in tools or [] %} # {{ tool.function.name }}{% endfor %}"
)
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "disable_log_stats": True,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
}


class Running:
    """A server that answers until `stop`."""

    def __init__(self, llm: AsyncLLM, **settings: Any) -> None:
        self.llm = llm
        made = evolve(Settings(model_names=("tiny",), chat_template=TEMPLATE, tool_call_parser="hermes"), **settings)
        self.app = make_app(llm, made)
        self._socket = bound_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        ready = Event()
        self.server = DrainingServer(self.app, made, ready.set)
        self._thread = Thread(target=self.server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        assert ready.wait(WAIT_S)
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="any", max_retries=0, http_client=httpx.Client(trust_env=False)
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", prompt=prompt, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def wait_until_idle(self) -> None:
        """Wait until the engine has no request, and assert that all of its blocks are free."""
        wait_for(lambda: not self.llm.engine.has_unfinished)
        self.llm.engine.kv.check_integrity()
        assert self.llm.engine.kv.num_free_blocks == self.llm.engine._num_kv_blocks

    def stop(self) -> None:
        self.http.close()
        self.openai.close()
        self.server.should_exit = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._socket.close()


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a stream that ended as it should."""
    *events, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def last_event(text: str) -> dict[str, Any]:
    """The last JSON object of a stream that ended as it should."""
    return events_of(text)[-1]


def read_until(process: subprocess.Popen[str], part: str) -> str:
    """Read lines of standard error up to one that has this part, and return it."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if part in line:
            return line
    raise AssertionError(f"the server ended with status {process.wait()}: {lines}")


@contextmanager
def serving(*arguments: str, before: str = "") -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A context with a process that serves the embedded model with further arguments of `spec-decode serve`, and with a
    client of it. What is left of the process is killed.

    before: Python code that the process runs first.
    """
    line = ["serve", "tiny", "--port", "0", "--dtype", "float32", *arguments]
    interruptible = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"  # not so in the background
    )
    code = f"{interruptible}\n{before}\nfrom specdec_core.cli import main\nmain({line!r})"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        try:
            url = read_until(process, "Serving tiny at ").split()[3].removesuffix("/v1.")
            with httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client:
                yield process, client
        finally:
            process.kill()


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


@contextmanager
def limited(llm: AsyncLLM, num_steps: int) -> Iterator[None]:
    """A context in which the engine runs so many steps at most. Between those that it does not run, its thread takes
    new requests and ends cancelled ones as always."""
    step, num_left = llm._session.step, num_steps

    def step_if_any_is_left() -> None:
        nonlocal num_left
        if num_left:
            num_left -= 1
            step()
        else:
            time.sleep(0.002)

    llm._session.step = step_if_any_is_left  # type: ignore[method-assign]
    try:
        yield
    finally:
        del llm._session.step
