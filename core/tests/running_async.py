"""Scenarios with an `AsyncLLM`, each in an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import TMonitor

from specdec_core import LLM, AsyncLLM, SamplingParams, StreamOutput

PROMPTS = [f"def function_{i}(value):\n    return value + {i}\n\n\ndef function_{i + 1}(" for i in range(6)]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    """A context, or a decorator, that asserts that each thread begun in it has ended."""
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    assert [thread for thread in left if not isinstance(thread, TMonitor)] == [], "TMonitor: of tqdm's bars"


def with_llm(scenario: Callable[[AsyncLLM], Awaitable[None]], **settings: Any) -> AsyncLLM:
    """Run a scenario with an AsyncLLM in a new event loop, and assert that no request and no block is left. Returns the
    closed AsyncLLM.

    scenario: an async function that takes the AsyncLLM.
    settings: keyword arguments of AsyncLLM.
    """
    llm = AsyncLLM("tiny", **{**SETTINGS, **settings})

    async def run() -> None:
        async with llm:
            await scenario(llm)

    with no_thread_is_left():
        asyncio.run(run())
    assert not llm._session.engine.has_unfinished
    llm._session.engine.kv.check_integrity()
    return llm


async def read(outputs: AsyncIterator[StreamOutput]) -> tuple[str, list[int]]:
    text, token_ids, reason = "", [], None
    async for output in outputs:
        assert reason is None, "it had ended"
        text += output.text
        token_ids += [piece.token_id for piece in output.pieces]
        reason = output.finish_reason
    assert reason is not None
    return text, token_ids


def greedy_outputs() -> list[tuple[str, list[int]]]:
    """What `LLM` answers to PROMPTS with GREEDY."""
    outputs = LLM("tiny", **SETTINGS).generate(PROMPTS, GREEDY)
    return [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs]
