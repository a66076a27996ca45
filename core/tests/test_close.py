"""A proposer is closed when its engine is closed or garbage-collected, or when the interpreter exits."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from good_proposers import NoOptions, offer

from specdec_core import (
    LLM,
    AsyncLLM,
    Draft,
    PluginError,
    Plugins,
    PluginWarning,
    Proposer,
    SamplingParams,
    SpecdecError,
    cli,
    hookimpl,
)
from specdec_testing import propose, tiny_target

HERE = Path(__file__).parent
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [i, i + 1, i]} for i in range(3)]


def nothing(*_: Any) -> None: ...


LIFE: list[str] = []
"""The calls that the proposer got, in order."""


class Diary(Proposer):
    def __init__(self, config: Any, context: Any) -> None:
        self.context = context
        self.batch: Any = None

    def start(self, request: Any) -> None:
        LIFE.append("start")

    def propose(self, batch: Any) -> Draft:
        self.batch = batch  # it may hold on to the last one
        return Draft.from_chains([[0]] * len(batch.requests))

    def finish(self, request: Any, reason: str) -> None:
        LIFE.append(f"finish {reason}")

    def close(self) -> None:
        LIFE.append("close" if torch.is_inference_mode_enabled() else "close outside of inference mode")


class Failing(Diary):
    def close(self) -> None:
        super().close()
        raise OSError("the disk is full")


class Unfinished(Failing):
    def finish(self, request: Any, reason: str) -> None:
        super().finish(request, reason)
        raise ValueError("cannot finish")


class Without:
    """A proposer that has no method `close` and does not subclass Proposer."""

    def __init__(self, config: Any, context: Any) -> None:
        self.start = self.observe = self.reset = lambda *_: None
        self.finish = lambda request, reason: LIFE.append(f"finish {reason}")

    def propose(self, batch: Any) -> Draft:
        return Draft.from_chains([[]] * len(batch.requests))


@hookimpl
def specdec_proposers() -> Any:
    return [offer(kind.__name__.lower(), kind, NoOptions) for kind in (Diary, Failing, Unfinished, Without)]


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    LIFE.clear()
    yield
    gc.collect()
    LIFE.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def settings(method: str) -> dict[str, Any]:
    return {
        "plugins": Plugins.load(modules=[__name__]),
        "speculative_config": {"method": method, "num_speculative_tokens": 2},
        "skip_tokenizer_init": True,
        "dtype": "float32",
    }


@pytest.fixture
def make(folder: Path) -> Any:
    return lambda method="diary": LLM(folder, **settings(method))


def test_with(make: Any) -> None:
    with make() as llm:
        llm.generate(PROMPTS, PARAMS)
        assert "close" not in LIFE
    assert LIFE == ["start"] * 3 + ["finish length"] * 3 + ["close"]
    llm.close()
    assert LIFE.count("close") == 1
    with pytest.raises(SpecdecError, match="was closed"):
        llm.generate(PROMPTS, PARAMS)
    with pytest.raises(SpecdecError, match="was closed"):
        next(llm.stream(PROMPTS, PARAMS))
    with pytest.raises(SpecdecError, match="was closed"):
        llm.engine.add_request([1, 2], PARAMS)
    with pytest.raises(SpecdecError, match="was closed"):
        llm.engine.step()
    assert not llm.engine.has_unfinished
    assert llm.get_metrics()
    del llm
    gc.collect()
    assert LIFE.count("close") == 1


def test_without_a_request(make: Any) -> None:
    make().close()
    assert LIFE == ["close"]


def test_running_and_waiting_requests_are_aborted_first(make: Any) -> None:
    llm = make()
    stream = llm.stream(PROMPTS, ENDLESS)
    next(stream)
    waiting: list[str | None] = []
    llm.engine.add_request([1, 2], ENDLESS, lambda request, pieces: waiting.append(request.finish_reason))
    llm.close()
    assert LIFE == ["start"] * 3 + ["finish abort"] * 3 + ["close"]
    assert waiting == ["abort"]
    assert not llm.engine.has_unfinished
    llm.engine.kv.check_integrity()
    assert {output.prompt_index: output.finish_reason for output in stream} == dict.fromkeys(range(3), "abort")


def test_a_listener_may_close(make: Any) -> None:
    llm = make()
    llm.engine.add_request([1, 2], ENDLESS, lambda request, pieces: llm.close())
    llm.engine.step()
    assert LIFE == ["start", "finish abort", "close"]


@pytest.mark.parametrize(("method", "said"), [("failing", "OSError: the disk is full"), ("unfinished", "OSError")])
def test_an_exception_names_the_proposer(make: Any, method: str, said: str) -> None:
    llm = make(method)
    llm.engine.add_request([1, 2], ENDLESS)
    llm.engine.step()
    with pytest.raises(PluginError, match=rf"proposer '{method}' failed to close: {said}"):
        llm.close()
    assert LIFE == ["start", "finish abort", "close"]
    assert llm.engine.is_closed
    llm.close()


def test_what_fails_before_it_does_not_keep_it_from_closing(make: Any) -> None:
    llm = make("unfinished")
    for prompt in ([1, 2], [3, 4]):
        llm.engine.add_request(prompt, ENDLESS)
    llm.engine.step()
    llm.engine.add_request([5, 6], ENDLESS)
    with pytest.raises(PluginError):
        llm.close()
    assert not llm.engine.has_unfinished
    assert LIFE == ["start"] * 2 + ["finish abort"] * 2 + ["close"]
    llm.engine.kv.check_integrity()


def test_a_proposer_without_close(make: Any) -> None:
    with make("without") as llm:
        llm.generate(PROMPTS[0], PARAMS)
    assert LIFE == ["finish length"]


def test_plain_decoding_can_be_closed_too(folder: Path) -> None:
    with LLM(folder, skip_tokenizer_init=True) as llm:
        llm.generate(PROMPTS[0], PARAMS)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_one_that_is_dropped(make: Any, num_steps: int) -> None:
    """An engine that loses its last reference is closed at once, because it is in no reference cycle."""
    gc.collect()
    gc.disable()
    try:
        llm = make()
        model = weakref.ref(llm.engine.target)
        llm.generate(PROMPTS, PARAMS)
        llm.engine.add_request([1, 2], ENDLESS, lambda request, pieces: None)
        for _ in range(num_steps):
            llm.engine.step()
        LIFE.clear()
        del llm
        assert LIFE.count("finish abort") == (num_steps > 0)
        assert LIFE[-1] == "close"
    finally:
        gc.enable()
    gc.collect()
    assert model() is None


def test_one_that_is_dropped_in_a_cycle(make: Any) -> None:
    """An engine in a reference cycle with its own requests is closed by the garbage collector."""
    llm = make()
    model = weakref.ref(llm.engine.target)
    llm.engine.add_request([1, 2], ENDLESS, partial(nothing, llm.engine))
    for _ in range(4):  # the proposer keeps a batch
        llm.engine.step()
    del llm
    gc.collect()
    assert LIFE[-1] == "close"
    assert model() is None


def test_an_exception_of_one_that_is_dropped_is_a_warning(make: Any) -> None:
    llm = make("failing")
    with pytest.warns(PluginWarning, match="proposer 'failing' failed to close: OSError: the disk is full"):
        del llm
    assert LIFE == ["close"]


def test_async(folder: Path) -> None:
    async def run(method: str) -> None:
        async with AsyncLLM(folder, **settings(method)) as llm:
            outputs = llm.generate(PROMPTS[0], ENDLESS)
            await anext(outputs)
        await llm.shutdown()
        with pytest.raises(SpecdecError, match="was shut down"):
            [output async for output in outputs]

    asyncio.run(run("diary"))
    assert LIFE == ["start", "finish abort", "close"]
    with pytest.raises(PluginError, match="proposer 'failing' failed to close"):
        asyncio.run(run("failing"))


def test_async_that_is_dropped(folder: Path) -> None:
    """A dropped AsyncLLM is closed, even if its proposer keeps old requests, which refer to the AsyncLLM."""

    async def run() -> Any:
        llm = AsyncLLM(folder, **settings("diary"))
        async for _ in llm.generate(PROMPTS[0], PARAMS):
            pass
        return weakref.ref(llm._session.engine.target)

    model = asyncio.run(run())
    deadline = time.monotonic() + 60
    while model() is not None and time.monotonic() < deadline:  # its thread may be just ending a step
        gc.collect()
        time.sleep(0.01)
    assert model() is None
    assert LIFE[-1] == "close"


def test_at_the_interpreters_exit(folder: Path) -> None:
    """At the interpreter's exit the proposer is closed; an exception from `close` becomes a warning."""
    code = f"""
        import test_close
        close = test_close.Diary.close
        test_close.Diary.close = lambda self: (close(self), print(test_close.LIFE))
        llm = test_close.LLM({str(folder)!r}, **test_close.settings("failing"))
        llm.engine.add_request([1, 2], test_close.ENDLESS)
        llm.engine.step()
        print("the end")
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert (result.returncode, result.stdout) == (0, "the end\n['start', 'finish abort', 'close']\n"), result.stderr
    assert "PluginWarning: proposer 'failing' failed to close: OSError: the disk is full" in result.stderr


def test_the_helpers_for_tests_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = Plugins.load(modules=[__name__])
    monkeypatch.setattr(Plugins, "load", classmethod(lambda cls: plugins))
    assert propose("diary", [[1, 2]])[0].token_ids == [0]
    assert LIFE == ["start", "finish length", "close"]
    assert propose("without", [[1, 2]])[0].token_ids == []


def test_commands_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = Plugins.load(modules=[__name__])
    monkeypatch.setattr(Plugins, "load", classmethod(lambda cls, disable=(): plugins))
    result = CliRunner().invoke(cli.main, ["generate", "--method", "failing", "--max-tokens", "4", "def f"])
    assert LIFE[-1] == "close"
    assert result.exit_code == 1
    assert "error: proposer 'failing' failed to close: OSError: the disk is full" in result.stderr
