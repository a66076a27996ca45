"""AsyncLLM: concurrent generators share a batch, can be cancelled, raise only their own errors, and leave no thread
behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from running_async import ENDLESS, GREEDY, PROMPTS, SETTINGS, greedy_outputs, no_thread_is_left, read, with_llm

from specdec_core import LLM, AsyncLLM, ConfigError, SamplingParams, SpecdecError


@pytest.fixture(scope="module")
def expected() -> list[tuple[str, list[int]]]:
    return greedy_outputs()


def test_generators_that_run_at_once_are_one_batch(expected: list) -> None:
    batch_sizes: list[int] = []

    async def scenario(llm: AsyncLLM) -> None:
        step = llm._session.engine.step

        def counting_step() -> Any:
            report = step()
            batch_sizes.append(report.num_decode_requests)
            return report

        llm._session.engine.step = counting_step  # type: ignore[method-assign]
        found = await asyncio.gather(*(read(llm.generate(prompt, GREEDY)) for prompt in PROMPTS))
        assert found == expected

    llm = with_llm(scenario)
    assert max(batch_sizes) > 3
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["vllm:generation_tokens"] == sum(len(token_ids) for _, token_ids in expected)


def test_one_after_the_other_and_in_between(expected: list) -> None:
    """Outputs are right for requests one after another, and for requests at the same time."""

    async def scenario(llm: AsyncLLM) -> None:
        for prompt, output in zip(PROMPTS[:2], expected, strict=False):
            assert await read(llm.generate({"prompt": prompt}, GREEDY)) == output
        first = llm.generate(PROMPTS[0], ENDLESS)
        await anext(first)
        assert await read(llm.generate(PROMPTS[1], GREEDY)) == expected[1]
        await anext(first)
        await first.aclose()

    with_llm(scenario)


def test_several_completions() -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=8, ignore_eos=True)
    (output,) = LLM("tiny", **SETTINGS).generate(PROMPTS[0], params)

    async def scenario(llm: AsyncLLM) -> None:
        token_ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for part in llm.generate(PROMPTS[0], params):
            token_ids[part.index] += [piece.token_id for piece in part.pieces]
        assert token_ids == {completion.index: completion.token_ids for completion in output.outputs}

    with_llm(scenario)


def test_a_chat() -> None:
    template = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    messages = [{"role": "user", "content": "sort a list"}]
    (output,) = LLM("tiny", **SETTINGS).chat(messages, GREEDY, chat_template=template)

    async def scenario(llm: AsyncLLM) -> None:
        answer = await read(llm.chat(messages, GREEDY, chat_template=template))
        assert answer == (output.outputs[0].text, output.outputs[0].token_ids)
        with pytest.raises(ConfigError, match="no chat template"):
            await read(llm.chat(messages, GREEDY))

    with_llm(scenario)


def test_closing_and_cancelling_end_the_request(expected: list) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        closed = llm.generate(PROMPTS[0], ENDLESS)
        await anext(closed)
        task = asyncio.create_task(read(llm.generate(PROMPTS[1], ENDLESS)))
        rest = llm.generate(PROMPTS[2], GREEDY)
        await anext(rest)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await closed.aclose()
        (_, token_ids) = await read(rest)
        assert token_ids == expected[2][1][-len(token_ids) :], "it was not disturbed"
        unstarted = llm.generate(PROMPTS[3], ENDLESS)
        await unstarted.aclose()
        assert not llm._session.engine.has_unfinished, "without a shutdown"

    with_llm(scenario)


@no_thread_is_left()
def test_a_generator_that_is_forgotten_is_cancelled() -> None:
    """When the event loop ends, it closes unfinished generators, which cancels their requests."""
    llm = AsyncLLM("tiny", **SETTINGS)

    async def scenario() -> None:
        async for _ in llm.generate(PROMPTS[0], ENDLESS):
            break

    asyncio.run(scenario())
    asyncio.run(llm.shutdown())
    assert not llm._session.engine.has_unfinished


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (5, None, "prompts=5 is not understood"),
        ("", None, "has no tokens"),
        ({"prompt_token_ids": [10**6]}, None, "not in the vocabulary"),
        ("text", SamplingParams(num_speculative_tokens=9), "exceeds the engine's 5"),
        ("text", {}, "sampling_params"),
    ],
    ids=str,
)
def test_a_bad_request_raises_in_its_own_generator(expected: list, prompt: Any, params: Any, message: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        good = asyncio.create_task(read(llm.generate(PROMPTS[0], GREEDY)))
        with pytest.raises(ConfigError, match=message):
            await read(llm.generate(prompt, params))
        assert await good == expected[0]

    with_llm(scenario)


def test_several_prompts_in_one_generator(expected: list) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        texts = [""] * 3
        async for output in llm.generate(PROMPTS[:3], GREEDY):
            texts[output.prompt_index] += output.text
        assert texts == [text for text, _ in expected[:3]]
        assert [output async for output in llm.generate([], GREEDY)] == []
        with pytest.raises(ConfigError, match="has no tokens"):
            await read(llm.generate([PROMPTS[0], ""], GREEDY))
        assert not llm.engine.has_unfinished, "none is run"

    with_llm(scenario)


def test_prompts_tokenized_elsewhere(expected: list) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"

    async def scenario(llm: AsyncLLM) -> None:
        for prompt in (
            await asyncio.to_thread(llm.tokenize, PROMPTS[0]),
            llm.tokenize_chat([{"role": "user", "content": PROMPTS[0]}], chat_template=template),
        ):
            assert await read(llm.generate({"prompt_token_ids": prompt.token_ids}, GREEDY)) == expected[0]
        tokenizer = llm.get_tokenizer()
        for add in (True, False):
            found = llm.tokenize(PROMPTS[0], add_special_tokens=add)
            assert found.token_ids == tokenizer(PROMPTS[0], add_special_tokens=add).input_ids

    with_llm(scenario)


def test_metrics_are_read_between_steps() -> None:
    """The engine's thread reads them, so they agree with each other at any time, and a cancelled reader disturbs no
    request."""
    threads: list[str] = []

    async def scenario(llm: AsyncLLM) -> None:
        read_metrics = llm._session.read_metrics

        def noting() -> Any:
            threads.append(threading.current_thread().name)
            return read_metrics()

        llm._session.read_metrics = noting  # type: ignore[method-assign]
        task = asyncio.create_task(read(llm.generate(PROMPTS[0], ENDLESS)))
        await asyncio.sleep(0)
        cancelled = asyncio.create_task(llm.read_metrics())
        await asyncio.sleep(0)
        cancelled.cancel()
        for _ in range(20):
            found = {metric.name: metric for metric in await llm.read_metrics()}
            counted = found["vllm:time_to_first_token_seconds"].count + found["vllm:inter_token_latency_seconds"].count  # type: ignore[union-attr]
            drafted, accepted = (found[f"vllm:spec_decode_num_{name}"].value for name in ("drafts", "accepted_tokens"))
            assert found["vllm:generation_tokens"].value == counted + accepted, drafted  # type: ignore[operator]
        if task.done():
            await task  # raises if a reader disturbed it
        task.cancel()
        assert {*threads} == {"specdec-engine"}

    llm = with_llm(scenario)
    assert [metric.name for metric in asyncio.run(llm.read_metrics())] == [metric.name for metric in llm.get_metrics()]


def test_other_threads_read_metrics_between_steps() -> None:
    """`get_metrics` waits for the step that runs. In the engine's own thread, it does not."""
    readers: list[threading.Thread] = []

    async def scenario(llm: AsyncLLM) -> None:
        session, read_metrics, step = llm._session, llm._session.read_metrics, llm._session.step

        def noting_read() -> Any:
            readers.append(threading.current_thread())
            return read_metrics()

        def step_that_reads() -> None:
            step()
            assert llm.get_metrics()

        session.read_metrics = noting_read  # type: ignore[method-assign]
        session.step = step_that_reads  # type: ignore[method-assign]
        task = asyncio.create_task(read(llm.generate(PROMPTS[0], GREEDY)))
        metrics = await asyncio.to_thread(llm.get_metrics)
        assert "vllm:generation_tokens" in [metric.name for metric in metrics]
        await task
        assert len(readers) > 5
        assert {thread.name for thread in readers} == {"specdec-engine"}

    with_llm(scenario)


@pytest.mark.parametrize("is_thread", [False, True], ids=["in_a_step", "in_the_thread"])
def test_an_exit_in_the_engine_s_thread_ends_no_event_loop(expected: list, is_thread: bool) -> None:
    """In a step, it ends that step's requests. Elsewhere it is the end of the engine, which says so to all requests."""

    async def scenario(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(read(llm.generate(prompt, ENDLESS))) for prompt in PROMPTS[:2]]
        while len(llm._streams) < 2:
            await asyncio.sleep(0.001)

        def leave(*given: Any) -> None:
            raise SystemExit("left")

        owner, name = (llm, "_attempt") if is_thread else (llm._session.engine, "_step")
        setattr(owner, name, leave)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        delattr(owner, name)
        assert [type(error) for error in errors] == [SpecdecError] * 2
        assert all(isinstance(error.__cause__, SystemExit) for error in errors if isinstance(error, SpecdecError))
        assert llm.is_healthy is not is_thread
        if is_thread:
            assert "restart the process" in str(llm.failure)
            with pytest.raises(SpecdecError, match="the engine's thread ended by SystemExit: left"):
                await read(llm.generate(PROMPTS[0], GREEDY))
        else:
            assert await read(llm.generate(PROMPTS[0], GREEDY)) == expected[0]

    with_llm(scenario)


def test_what_the_engine_s_thread_is_at() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        assert (llm.progress, llm.describe_work(), llm.failure) == (None, "", None)
        is_over, step = threading.Event(), llm._session.step

        def wait_for_the_end() -> None:
            is_over.wait(60)
            step()

        llm._session.step = wait_for_the_end  # type: ignore[method-assign]
        task = asyncio.create_task(read(llm.generate(PROMPTS[0], GREEDY)))
        while "in wait_for_the_end" not in llm.describe_work():
            await asyncio.sleep(0.001)
        before = llm.progress
        await asyncio.sleep(0.05)
        assert llm.progress == before, "the step goes on"
        is_over.set()
        await task
        assert before is not None
        assert llm._num_done > before

    with_llm(scenario)


def test_shutdown_ends_what_runs() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        outputs = llm.generate(PROMPTS[0], ENDLESS)
        await anext(outputs)
        await llm.shutdown()
        with pytest.raises(SpecdecError, match="was shut down"):
            await read(outputs)
        with pytest.raises(SpecdecError, match="was shut down: make another one"):
            await read(llm.generate(PROMPTS[0]))
        await llm.shutdown()

    with_llm(scenario)


@no_thread_is_left()
def test_one_llm_in_several_event_loops(expected: list) -> None:
    llm = AsyncLLM("tiny", **SETTINGS)
    for _ in range(2):
        assert asyncio.run(read(llm.generate(PROMPTS[0], GREEDY))) == expected[0]
    asyncio.run(llm.shutdown())
