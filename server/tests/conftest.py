"""Fixtures: an engine and a real server on the loopback interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from running_server import ENGINE, Running

from specdec_core import LLM, AsyncLLM


@pytest.fixture(scope="session")
def reference() -> Iterator[LLM]:
    """Plain decoding, without a server."""
    with LLM("tiny", **{**ENGINE, "speculative_config": None}) as llm:
        yield llm


@pytest.fixture(scope="session")
def llm() -> Iterator[AsyncLLM]:
    made = AsyncLLM("tiny", **ENGINE)
    yield made
    asyncio.run(made.shutdown())


@pytest.fixture(scope="session")
def server(llm: AsyncLLM) -> Iterator[Running]:
    running = Running(llm)
    yield running
    running.stop()


@pytest.fixture
def serve(llm: AsyncLLM) -> Iterator[Callable[..., Running]]:
    """Return a function that starts another server with these settings, by default of the same engine."""
    with ExitStack() as ending:

        def start(engine: AsyncLLM | None = None, **settings: Any) -> Running:
            running = Running(engine or llm, **settings)
            ending.callback(running.stop)
            return running

        yield start


@pytest.fixture(autouse=True)
def no_callback_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An exception in a callback of the event loop reaches no request: it is only logged."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.name == "asyncio"] == []
