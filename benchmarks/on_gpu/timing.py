"""Times functions on a device, and keeps a benchmark going where one of its cells fails."""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from on_gpu.setup import Setup

NUM_WARM = 2
MOST_CALLS = 200
FLUSHED_BYTES = 2**30
"""More than the second-level cache of a GPU holds: a kernel's inputs come from memory, as they do in a model. It takes
a GPU 0.3 ms to write them; in that time the host launches what is timed."""
MOST_OF_ERROR = 400
TIME_IS_OVER = "the time of this part is over"

synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None


def seconds_of(function: Callable[[], Any], device: str, cell_s: float) -> float:
    """Return the median seconds of a call, from its start to its end on the device.

    cell_s: how long it is called, at least once, after NUM_WARM calls to compile and to warm up.
    """
    for _ in range(NUM_WARM):
        function()
    synchronize()
    once = _once_on_gpu if device == "cuda" else _once
    started = perf_counter()
    found = [once(function)]
    while perf_counter() - started < cell_s and len(found) < MOST_CALLS:
        found.append(once(function))
    return median(found)


def _once(function: Callable[[], Any]) -> float:
    started = perf_counter()
    function()
    return perf_counter() - started


def _once_on_gpu(function: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda").zero_()
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class DeviceIsDeadError(Exception):
    """After an error such as an illegal access to memory, only a new process can use the GPU. row: of that cell."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row["error"])
        self.row = row


def attempt(setup: Setup, row: dict[str, Any], measure: Callable[[], dict[str, Any]], needed_s: float = 0) -> Any:
    """Measure one cell. Returns `row` with the results, or with the error, or with the note that no time was left.

    needed_s: seconds that the part must have left.
    Raises DeviceIsDeadError if the device cannot be used any more.
    """
    if not setup.has(needed_s):
        return {**row, "skipped": TIME_IS_OVER}
    try:
        row = {**row, **measure()}
    except Exception as error:  # whatever it is, the other cells go on
        row = {**row, "error": said(error)}
    try:
        free()
        synchronize()
    except Exception as error:
        raise DeviceIsDeadError({"error": said(error), **row}) from error
    return row


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_OF_ERROR]


def free() -> None:
    """Return memory that nothing uses to the device: an engine takes what is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
