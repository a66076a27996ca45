"""AsyncLLM: a failed step raises in the generators whose requests it ended, and the engine goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest
from running_async import ENDLESS, GREEDY, PROMPTS, greedy_outputs, read, with_llm

from specdec_core import (
    AsyncLLM,
    Draft,
    PluginError,
    Plugins,
    Proposer,
    ProposerSpec,
)


@pytest.fixture(scope="module")
def expected() -> list[tuple[str, list[int]]]:
    return greedy_outputs()


@attrs.frozen
class NoOptions:
    pass


class Failing(Proposer):
    """A proposer that drafts nothing.

    failures: how many more calls of `propose` raise an error. Only calls with a request of 30 or more tokens do.
    """

    failures = 0

    def propose(self, batch: Any) -> Draft:
        if Failing.failures and max(len(request.token_ids) for request in batch.requests) >= 30:
            Failing.failures -= 1
            raise ZeroDivisionError("a bug in this proposer")
        return Draft.from_chains([[]] * len(batch.requests))


class PluginsWithFailing:
    def __init__(self) -> None:
        self._installed = Plugins.load()

    def proposer(self, name: str) -> ProposerSpec:
        return ProposerSpec("failing", NoOptions, build=lambda config, context: Failing(), api=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)


def test_a_failed_step_reaches_every_running_generator_and_the_engine_goes_on(expected: list) -> None:
    Failing.failures = 1

    async def scenario(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(read(llm.generate(prompt, ENDLESS))) for prompt in PROMPTS[:4]]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [PluginError] * 4
        assert all("a bug in this proposer" in str(error) for error in errors)
        assert await read(llm.generate(PROMPTS[0], GREEDY)) == expected[0]

    config = {"method": "failing", "num_speculative_tokens": 2}
    with_llm(scenario, plugins=PluginsWithFailing(), speculative_config=config)


def test_a_failed_step_leaves_those_that_wait(expected: list) -> None:
    """If a step fails, the two running requests raise its error, and the two waiting ones generate their outputs."""
    Failing.failures = 1

    async def scenario(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(read(llm.generate(PROMPTS[i], GREEDY))) for i in range(4)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in found[:2]] == [PluginError] * 2
        assert found[2:] == expected[2:4]

    config = {"method": "failing", "num_speculative_tokens": 2}
    with_llm(scenario, plugins=PluginsWithFailing(), speculative_config=config, max_num_seqs=2)


def test_a_failure_outside_of_the_requests_reaches_all(expected: list) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        def fail(report: Any) -> None:
            llm._session.engine._step_finished = None
            raise ZeroDivisionError("a bug in a listener")

        llm._session.engine._step_finished = fail
        tasks = [asyncio.create_task(read(llm.generate(prompt, ENDLESS))) for prompt in PROMPTS[:2]]
        await asyncio.sleep(0)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert ZeroDivisionError in map(type, errors)
        assert await read(llm.generate(PROMPTS[0], GREEDY)) == expected[0]

    with_llm(scenario, max_model_len=64)
