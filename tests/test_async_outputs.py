"""AsyncLLM: what its outputs have, each step's, those of an interval, and whole completions."""

from __future__ import annotations

import asyncio
import threading
from itertools import chain
from math import inf, nan
from typing import Any

import pytest
from running_async import ENDLESS, GREEDY, PROMPTS, SETTINGS, with_llm

from specdec_core import (
    LLM,
    AsyncLLM,
    ConfigError,
    SamplingParams,
    StreamOutput,
)
from specdec_core.api import async_llm


def test_the_last_output_has_the_requests_figures() -> None:
    params = SamplingParams(seed=3, n=2, max_tokens=24, ignore_eos=True)
    (output,) = LLM("tiny", **SETTINGS).generate(PROMPTS[0], params)

    async def scenario(llm: AsyncLLM) -> None:
        parts = [part async for part in llm.generate(PROMPTS[0], params)]
        last = [part for part in parts if part.finish_reason is not None]
        assert {part.speculation for part in parts if part.finish_reason is None} == {None}
        counts = [part.speculation for part in last if part.speculation is not None]
        assert len(counts) == 2
        assert counts[0] + counts[1] == output.speculation
        assert output.speculation.num_drafts > 0
        assert [part.num_cached_tokens for part in last] == [0, 0]

    with_llm(scenario, seed=0)


def test_the_last_output_has_the_cached_tokens() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        cached = []
        for _ in range(2):
            *_, last = [part async for part in llm.generate(PROMPTS[0], GREEDY)]
            cached.append(last.num_cached_tokens)
        assert cached[0] == 0 < cached[1]

    with_llm(scenario, kv_manager="prefix", block_size=4)


@pytest.mark.parametrize("stop", [(), ("value",)])
def test_whole_completions(stop: tuple) -> None:
    """Without streaming, a generator yields each completion once, with what its stream has altogether."""
    params = SamplingParams(
        seed=3, n=2, max_tokens=24, ignore_eos=True, stop=stop, logprobs=1, prompt_logprobs=1, bad_words=["return"]
    )

    async def scenario(llm: AsyncLLM) -> None:
        parts: dict[tuple[int, int], list[StreamOutput]] = {}
        async for part in llm.generate(PROMPTS[:2], params):
            parts.setdefault((part.prompt_index, part.index), []).append(part)
        whole = {
            (part.prompt_index, part.index): part async for part in llm.generate(PROMPTS[:2], params, stream=False)
        }
        assert whole.keys() == parts.keys()
        for key, found in whole.items():
            first, last = parts[key][0], parts[key][-1]
            assert found.text == "".join(part.text for part in parts[key])
            for name in ("token_id", "logprobs"):
                expected = [getattr(piece, name) for part in parts[key] for piece in part.pieces]
                assert [getattr(piece, name) for piece in found.pieces] == expected
            assert (found.finish_reason, found.stop_reason) == (last.finish_reason, last.stop_reason)
            assert found.prompt_logprobs == first.prompt_logprobs
        closed = llm.generate(PROMPTS[0], ENDLESS, stream=False)
        task = asyncio.create_task(anext(closed))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()

    with_llm(scenario, speculative_config={**SETTINGS["speculative_config"], "adaptive_draft_length": False})


def test_outputs_of_an_interval_come_together() -> None:
    """A completion's first tokens come at once, and so do its last ones; those between them after the interval."""
    params = SamplingParams(seed=3, n=2, max_tokens=24, ignore_eos=True, logprobs=1)

    async def scenario(llm: AsyncLLM) -> None:
        each = [part async for part in llm.generate(PROMPTS[:2], params)]
        rare = [part async for part in llm.generate(PROMPTS[:2], params, stream_interval_s=1e9)]
        for key in {(part.prompt_index, part.index) for part in each}:
            found, (first, *rest) = (
                [part for part in parts if (part.prompt_index, part.index) == key] for parts in (rare, each)
            )
            assert len(rest) > 1
            assert [part.pieces for part in found] == [first.pieces, tuple(chain.from_iterable(p.pieces for p in rest))]
            assert [part.finish_reason for part in found] == [None, "length"]
            assert found[-1].speculation == rest[-1].speculation

    with_llm(scenario, speculative_config=None)


@pytest.mark.parametrize(
    "given", [*({"stream_interval_s": each} for each in (-1, nan, inf)), {"stream_interval_s": 1, "stream": False}]
)
def test_an_interval_that_means_nothing_is_refused(given: dict[str, Any]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(ConfigError, match="seconds from 0 on, with stream=True"):
            llm.generate(PROMPTS[0], GREEDY, **given)

    with_llm(scenario, speculative_config=None)


def test_the_model_is_loaded_in_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP would keep the threads of one that goes on."""
    seen, session = [], async_llm.Session

    def build(*args: Any, **keywords: Any) -> Any:
        seen.append(threading.current_thread())
        return session(*args, **keywords)

    monkeypatch.setattr(async_llm, "Session", build)

    async def scenario(llm: AsyncLLM) -> None:
        assert seen[0] is not threading.current_thread()
        assert not seen[0].is_alive()

    with_llm(scenario, speculative_config=None)
    with pytest.raises(ConfigError, match="max_num_seqs=0"):  # as it was raised there
        AsyncLLM("tiny", max_num_seqs=0)
