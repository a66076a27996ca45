"""After an error from which a GPU does not recover, every call and health check reports it, and all requests end.

No GPU is needed: a plugin raises the error of a device where its kernel would run.
"""

from __future__ import annotations

import asyncio
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch

from specdec_core import (
    LLM,
    AsyncLLM,
    DeviceError,
    Draft,
    OpsSpec,
    PluginError,
    Plugins,
    PluginWarning,
    Proposer,
    ProposerSpec,
    Request,
    SamplingParams,
    StreamOutput,
)
from specdec_core.ops import REFERENCE
from specdec_core.plugins.discovery import Plugin
from specdec_core.plugins.operations import Offer, OfferedOps

PROMPTS = [{"prompt_token_ids": [i, i + 1, i]} for i in range(3)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
MEMORY = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"


class KernelError(RuntimeError):
    """An exception class of a kernel library, unknown to the engine."""


class Device:
    """A simulated device whose calls can be made to fail.

    error: the exception to raise; None: no call fails.
    where: the name of the call that raises it; "": any call.
    is_final: whether all later calls raise it as well.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.where = ""
        self.is_final = True
        self.calls: list[str] = []

    def call(self, name: str) -> None:
        self.calls.append(name)
        if self.error is not None and self.where in (name, ""):
            error, self.where = self.error, "" if self.is_final else "nowhere"
            raise type(error)(*error.args)


DEVICE = Device()


class OnDevice(Proposer):
    def start(self, request: Any) -> None:
        DEVICE.call("start")

    def propose(self, batch: Any) -> Draft:
        DEVICE.call("propose")
        return Draft.from_chains([[0]] * len(batch.requests))

    def observe(self, observation: Any) -> None:
        DEVICE.call("observe")

    def finish(self, request: Any, reason: str) -> None:
        DEVICE.call("finish")

    def close(self) -> None:
        DEVICE.call("close")


def attention(*args: Any, **keywords: Any) -> torch.Tensor:
    DEVICE.call("operation")
    return REFERENCE["paged_attention"](*args, **keywords)


class Verifying:
    def __init__(self, verifier: Any) -> None:
        self._verifier = verifier

    def verify(self, *args: Any) -> Any:
        DEVICE.call("verify")
        return self._verifier.verify(*args)


@attrs.frozen
class NoOptions:
    pass


class PluginsOnDevice:
    def __init__(self) -> None:
        self._installed = Plugins.load()

    def proposer(self, name: str) -> ProposerSpec:
        return ProposerSpec("on_device", NoOptions, build=lambda config, context: OnDevice(), api=1)

    def verifier(self, name: str) -> Any:
        spec = self._installed.verifier(name)
        return attrs.evolve(spec, build=lambda **ops: Verifying(spec.build(**ops)))

    def ops(self, device: str) -> OfferedOps:
        return OfferedOps(
            (
                Offer(
                    Plugin("on_device", "this test", "1", __name__), OpsSpec(api=1, ops={"paged_attention": attention})
                ),
            )
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)


@pytest.fixture(autouse=True)
def works() -> Iterator[None]:
    DEVICE.__init__()  # type: ignore[misc]
    yield
    DEVICE.__init__()  # type: ignore[misc]


@pytest.fixture
def settings() -> dict[str, Any]:
    config = {"method": "on_device", "num_speculative_tokens": 2}
    return {"dtype": "float32", "speculative_config": config, "plugins": PluginsOnDevice(), "max_num_seqs": 2}


def fail(where: str, error: Exception | None = None, *, is_final: bool = True) -> None:
    DEVICE.error, DEVICE.where, DEVICE.is_final = error or torch.AcceleratorError(ASSERT), where, is_final


def check_dead(llm: LLM) -> None:
    """Assert that every call of the LLM raises DeviceError with a complete message, that no request is left, and that
    the engine can be closed."""
    assert llm.engine.is_dead
    assert not llm.is_healthy
    assert not llm.engine.has_unfinished
    llm.engine.kv.check_integrity()
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPTS, PARAMS, use_tqdm=False),
        lambda: next(llm.stream(PROMPTS, PARAMS)),
        lambda: llm.engine.add_request([1, 2], PARAMS),
        llm.engine.step,
    ]
    for call in calls:
        with pytest.raises(DeviceError, match="restart the process") as caught:
            call()
        check_words(caught.value)
    llm.engine.cancel("request-0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        llm.close()
    assert DEVICE.calls[-1] == "close"
    llm.close()
    with pytest.raises(DeviceError):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def check_words(error: BaseException) -> None:
    """Assert that the error's message is complete, and so is the traceback printed with it."""
    message = str(error)
    assert "device cpu failed" in message or "device cuda:1 failed" in message
    assert "\n" not in message
    assert "go on" not in "".join(traceback.format_exception(error))
    assert repr(error.__cause__) == repr(DEVICE.error)


WHERE = ["start", "operation", "verify", "observe", "propose", "finish"]


@pytest.mark.parametrize("where", WHERE)
def test_a_step(settings: dict, where: str) -> None:
    llm = LLM("tiny", **settings)
    assert llm.is_healthy
    fail(where)
    with pytest.raises(
        DeviceError, match=r"AcceleratorError: CUDA error: device-side assert triggered\. All"
    ) as caught:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    check_words(caught.value)
    assert llm.engine.failure is caught.value
    check_dead(llm)


def test_those_that_wait_and_other_streams_end_too(settings: dict) -> None:
    llm = LLM("tiny", **settings)
    outputs: dict[str, StreamOutput] = {}

    def keep(request: Request, pieces: Any) -> None:
        outputs[request.id] = StreamOutput.of(0, 0, request, pieces)

    first, second = llm.stream(PROMPTS[0], PARAMS), llm.stream(PROMPTS[1], PARAMS)
    next(first), next(second)
    waiting = llm.engine.add_request([1, 2], PARAMS, keep)
    fail("propose")
    with pytest.raises(DeviceError):
        for _ in first:
            pass
    with pytest.raises(DeviceError):
        for _ in second:
            pass
    check_dead(llm)
    assert outputs[waiting].finish_reason == "error"
    assert "restart the process" in str(outputs[waiting].error)


def test_a_cancellation(settings: dict) -> None:
    llm = LLM("tiny", **settings)
    request_id = llm.engine.add_request([1, 2], PARAMS)
    llm.engine.step()
    fail("finish")
    with pytest.raises(DeviceError):
        llm.engine.cancel(request_id)
    check_dead(llm)


def test_closing_warns_of_what_the_proposer_cannot_do(settings: dict) -> None:
    llm = LLM("tiny", **settings)
    fail("propose")
    with pytest.raises(DeviceError):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with pytest.warns(PluginWarning, match="failed to close: AcceleratorError"):
        llm.close()


ENOUGH = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), torch.AcceleratorError(MEMORY)]


@pytest.mark.parametrize("error", [*ENOUGH, KernelError("too many threads"), ValueError("a bug")], ids=repr)
def test_what_a_device_recovers_from(settings: dict, error: Exception) -> None:
    llm = LLM("tiny", **settings)
    expected = [output.outputs for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    fail("propose", error, is_final=False)
    with pytest.raises(PluginError, match="the engine can go on"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.is_healthy
    assert [output.outputs for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == expected
    llm.close()
    assert not llm.is_healthy


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines believe that their device is cuda:1. Synchronizing this device fails once the simulated device has
    failed for good."""

    def synchronize(device: torch.device) -> None:
        assert device == torch.device("cuda", 1)
        if DEVICE.error is not None and DEVICE.where == "":
            raise torch.AcceleratorError(ASSERT)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr("specdec_core.engine.engine.find_device", lambda device: torch.device("cuda", 1))
    monkeypatch.setattr("specdec_core.engine.device._current_gpu", lambda device: warnings.catch_warnings())


@pytest.mark.parametrize("where", ["propose", "operation"])
def test_a_plugins_own_type_of_error(settings: dict, second_gpu: None, where: str) -> None:
    """If a plugin raises an exception of its own class, the engine synchronizes the device. If synchronizing fails as
    well, the engine raises DeviceError."""
    llm = LLM("tiny", **settings)
    fail(where, KernelError("an illegal memory access was encountered"))
    with pytest.raises(DeviceError, match=r"cuda:1 failed.*device-side assert") as caught:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    check_words(caught.value)
    check_dead(llm)


def test_an_error_beside_a_device_that_works(settings: dict, second_gpu: None) -> None:
    llm = LLM("tiny", **settings)
    fail("propose", KernelError("too many threads"), is_final=False)
    with pytest.raises(PluginError, match="the engine can go on"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.is_healthy


def test_async_llm(settings: dict) -> None:
    """With AsyncLLM, two running requests and a waiting one end with DeviceError, and so does every later request."""

    async def read(llm: AsyncLLM, prompt: Any) -> None:
        async for _ in llm.generate(prompt, PARAMS):
            pass

    async def run() -> None:
        llm = AsyncLLM("tiny", **settings)
        await read(llm, PROMPTS[0])
        assert llm.is_healthy
        fail("propose")
        errors = await asyncio.gather(*(read(llm, prompt) for prompt in PROMPTS), return_exceptions=True)
        errors += await asyncio.gather(read(llm, PROMPTS[0]), return_exceptions=True)
        assert [type(error) for error in errors] == [DeviceError] * 4
        for error in errors:
            check_words(error)  # type: ignore[arg-type]
        assert not llm.is_healthy
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PluginWarning)
            await llm.shutdown()
        assert not llm.is_healthy

    asyncio.run(run())
    assert DEVICE.calls[-1] == "close"
