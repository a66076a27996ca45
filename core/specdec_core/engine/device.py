"""The engine's device: makes it current for the engine's code, and recognizes that it has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from specdec_core.errors import DeviceError, PluginError
from specdec_core.models.memory_errors import says_that_memory_ran_out, with_causes

_UNCHANGED = nullcontext()


def use_device(device: torch.device) -> AbstractContextManager[None]:
    """A context in which a device is the calling thread's current device. Does nothing for a CPU.

    torch runs its own operations on the device of their tensors. Kernels that plugins launch with Triton run on the
    current device, and in every new thread the current device is the first GPU.
    """
    return _current_gpu(device) if device.type == "cuda" else _UNCHANGED


@contextmanager
def _current_gpu(device: torch.device) -> Iterator[None]:
    """A context in which a GPU is the current device. If the GPU has failed, switching to it may raise an error. This
    error is ignored, because the code inside the context then raises one, too."""
    guard: AbstractContextManager[Any] = torch.cuda.device(device)
    with suppress(RuntimeError):
        guard.__enter__()
    try:
        yield
    finally:
        with suppress(RuntimeError):
            guard.__exit__(None, None, None)


def failure_of(device: torch.device, error: BaseException) -> DeviceError | None:
    """Return a DeviceError if an exception of a step means that the device has failed; None if the device still
    works. After a device-side assert or an access to an illegal address, for example, every later call would fail.

    torch has an exception type for a failed device. A plugin's code may raise any type, so the GPU itself is tested,
    too. Where ranks share the model, one that has failed is told by a DeviceError.
    """
    if not isinstance(error, Exception):
        return None
    if (told := next((each for each in with_causes(error) if isinstance(each, DeviceError)), None)) is not None:
        return told
    found = next(filter(_is_final, with_causes(error)), None)
    said = found or _complaint_of(device)
    if said is None:
        return None
    while isinstance(error, PluginError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the PluginError's text, that the engine can go on, is wrong here
    first_line = str(said).partition("\n")[0]
    failure = DeviceError(
        f"the device {device} failed, and every further call of it fails in this process: {type(said).__name__}: "
        f"{first_line}. All requests were ended, and this engine can run no more: restart the process"
    )
    failure.__cause__ = found or error
    return failure


def _is_final(error: BaseException) -> bool:
    return isinstance(error, torch.AcceleratorError) and not says_that_memory_ran_out(error)


def _complaint_of(device: torch.device) -> Exception | None:
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return None if says_that_memory_ran_out(error) else error
    return None
