"""Counts the CUDA calls of engine steps in a profile."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType

REGION = "the steps that are counted"
COUNTED = ("blocking_calls_per_step", "kernel_launches_per_step", "calls_per_step")
VERSION = re.compile(r"(_ptsz|_ptds)?(_v\d+)?$")  # what some versions of CUDA add to a call's name
WAIT = re.compile(r"cu(da)?(Stream|Event|Device|Ctx)Synchronize|cudaMemcpy(2D|3D)?(To|From)?(Array|Symbol)?")
LAUNCH = re.compile(r"cu(da)?(Launch(Cooperative)?Kernel(Ex|ExC)?|GraphLaunch)")


def count_calls(events: Iterable[Any], num_steps: int) -> dict[str, Any]:
    """Count the CUDA calls per step in a profile of several steps.

    events: the profiler's events. Only calls that begin within the event named REGION count.
    num_steps: number of steps within that event.
    Returns a dict with the keys of COUNTED. All values are None if the profiler recorded no CUDA call.
    - blocking_calls_per_step: calls that make the host wait for the GPU. There are three kinds: synchronization with a
      stream, event, device or context (such as cudaStreamSynchronize), synchronous copies (such as cudaMemcpy), and
      cudaMemcpyAsync to or from pageable memory. A call of the last kind and a cudaStreamSynchronize right after it
      count as one call; `.item()`, `.cpu()`, `nonzero()` and `torch.tensor(..., device="cuda")` make such pairs. A
      cudaMemcpyAsync to or from pinned memory does not count, since it returns at once. cudaMalloc, cudaFree and
      cudaHostAlloc do not count, though they may wait.
    - kernel_launches_per_step: launches of a kernel or of a CUDA graph.
    - calls_per_step: {name of the call: calls per step} of all CUDA calls. The name of a cudaMemcpyAsync includes the
      kinds of memory that it copies from and to.
    """
    events = sorted(events, key=lambda event: event.time_range.start)
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    region = next(event.time_range for event in on_host if event.name == REGION)
    calls = [e for e in on_host if re.match("cu(da)?[A-Z]", e.name) and region.start <= e.time_range.start < region.end]
    if not calls:
        return dict.fromkeys(COUNTED)
    memory = {event.id: event.name.removeprefix("Memcpy ") for event in events if event.name.startswith("Memcpy ")}
    names = [VERSION.sub("", call.name) for call in calls]
    kinds = [f" {memory.get(call.id, '(unknown)')}" if "MemcpyAsync" in call.name else "" for call in calls]
    alone = (kind for kind, after in zip(kinds, [*names[1:], ""], strict=True) if after != "cudaStreamSynchronize")
    num_blocking = sum(bool(WAIT.fullmatch(name)) for name in names) + sum("Pageable" in kind for kind in alone)
    num_launches = sum(bool(LAUNCH.fullmatch(name)) for name in names)
    by_name = {name: n / num_steps for name, n in Counter(map(str.__add__, names, kinds)).most_common()}
    return dict(zip(COUNTED, (num_blocking / num_steps, num_launches / num_steps, by_name), strict=True))
