"""With device="cuda:1", all code that an engine runs has that GPU as torch's current device, in every thread.

Code outside the engine is unaffected. No GPU is needed: the engine computes on the CPU but is told that its device is
cuda:1, and a stand-in for `torch.cuda.device` records which device is current.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch

from specdec_core import LLM, AsyncLLM, Draft, Plan, Plugins, Proposer, ProposerSpec, SamplingParams
from specdec_core.engine import engine
from specdec_core.engine.device import use_device
from specdec_core.models.load import find_device

PROMPTS = [{"prompt_token_ids": [i, i + 1, i]} for i in range(3)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


class Current(threading.local):
    index = 0  # where every thread begins


CURRENT = Current()
SEEN: list[tuple[str, int]] = []
"""(what ran, index of the device that was current)."""


class CudaDevice:
    """Stands in for `torch.cuda.device`, and keeps the index of the current device in CURRENT."""

    def __init__(self, device: torch.device) -> None:
        self.index, self.before = device.index, -1

    def __enter__(self) -> None:
        self.before, CURRENT.index = CURRENT.index, self.index

    def __exit__(self, *_: object) -> None:
        CURRENT.index = self.before


def see(what: str) -> None:
    SEEN.append((what, CURRENT.index))


def seen() -> set[str]:
    """Assert that device 1 was current in every recorded call. Returns the names of the calls."""
    assert {index for _, index in SEEN} == {1}, SEEN
    return {what for what, _ in SEEN}


class Watching(Proposer):
    def start(self, request: Any) -> None:
        see("start")

    def propose(self, batch: Any) -> Draft:
        see("propose")
        return Draft.from_chains([[0]] * len(batch.requests))

    def observe(self, observation: Any) -> None:
        see("observe")

    def finish(self, request: Any, reason: str) -> None:
        see(f"finish {reason}")

    def close(self) -> None:
        see("close")


def build(config: Any, context: Any) -> Watching:
    see("build")
    return Watching()


def plan(config: Any, target: Any, num_speculative_tokens: int) -> Plan:
    see("plan")
    return Plan()


def process(logits: torch.Tensor, token_ids: Any) -> torch.Tensor:
    """A logits processor that records the current device. It runs when drafts are verified."""
    see("verify")
    return logits


@attrs.frozen
class NoOptions:
    pass


class PluginsWithWatching:
    def __init__(self) -> None:
        self._installed = Plugins.load()

    def proposer(self, name: str) -> ProposerSpec:
        return ProposerSpec("watching", NoOptions, build=build, plan=plan, api=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)


@pytest.fixture(autouse=True)
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "device", CudaDevice)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)  # it works
    monkeypatch.setattr(engine, "find_device", lambda device: torch.device("cuda", 1))
    SEEN.clear()
    yield
    gc.collect()
    assert CURRENT.index == 0, "of this thread it is what it was"
    SEEN.clear()


@pytest.fixture
def settings() -> dict[str, Any]:
    config = {"method": "watching", "num_speculative_tokens": 2}
    return {"dtype": "float32", "speculative_config": config, "plugins": PluginsWithWatching()}


def test_generate(settings: dict) -> None:
    with LLM("tiny", **settings) as llm:
        assert seen() == {"plan", "build"}
        assert CURRENT.index == 0
        llm.generate(PROMPTS, attrs.evolve(PARAMS, logits_processors=[process]), use_tqdm=False)
        assert seen() == {"plan", "build", "start", "propose", "observe", "verify", "finish length"}
        assert CURRENT.index == 0
    assert SEEN[-1][0] == "close"
    seen()


def test_what_runs_between_steps(settings: dict) -> None:
    llm = LLM("tiny", **settings)
    ids = [llm.engine.add_request([1, 2, 3], ENDLESS) for _ in range(2)]
    llm.engine.step()
    SEEN.clear()
    llm.engine.cancel(ids[0])
    assert seen() == {"finish abort"}
    SEEN.clear()
    llm.close()
    assert seen() == {"finish abort", "close"}


def test_one_that_is_dropped(settings: dict) -> None:
    llm = LLM("tiny", **settings)
    llm.engine.add_request([1, 2, 3], ENDLESS)
    llm.engine.step()
    llm.engine._speculation._device = torch.device("cuda", 1)
    del llm
    gc.collect()
    assert SEEN[-1][0] == "close"
    seen()


def test_threads_of_async_llm(settings: dict) -> None:
    async def run() -> None:
        async with AsyncLLM("tiny", **settings) as llm:
            for prompt in PROMPTS:  # one after the other: a thread for each
                async for _ in llm.generate(prompt, PARAMS):
                    pass
            running = llm.generate(PROMPTS[0], ENDLESS)
            await anext(running)

    asyncio.run(run())
    assert seen() == {"plan", "build", "start", "propose", "observe", "finish length", "finish abort", "close"}


def test_a_step_that_fails(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed step, the proposer's `finish` also runs with the engine's device as current device."""
    llm = LLM("tiny", **settings)
    llm.engine.add_request([1, 2, 3], ENDLESS)
    llm.engine.step()
    SEEN.clear()
    monkeypatch.setattr(Watching, "propose", lambda self, batch: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        llm.engine.step()
    assert SEEN[-1] == ("finish abort", 1)
    assert CURRENT.index == 0


def test_a_gpu_that_refuses_to_be_current_is_left_to_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(CudaDevice, name, refuse)
    with pytest.raises(ZeroDivisionError), use_device(torch.device("cuda", 1)):
        raise ZeroDivisionError


def test_a_cpu_costs_nothing() -> None:
    cpu = torch.device("cpu")
    assert use_device(cpu) is use_device(cpu)
    with use_device(cpu):
        assert CURRENT.index == 0


def test_the_device_is_found_with_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """find_device("cuda") returns a device with the index of the current GPU.

    Without an index, "cuda" means the GPU that is current in the calling thread.
    """
    empty = torch.empty

    def third_gpu(*size: int, device: Any) -> Any:
        return attrs.make_class("Tensor", ["device"])(torch.device("cuda", 2)) if str(device) == "cuda" else empty(0)

    monkeypatch.setattr(torch, "empty", third_gpu)
    assert find_device("cuda") == torch.device("cuda", 2)
    assert find_device("cpu") == torch.device("cpu")
