"""CUDA graphs of a pretend device: what was called while one was captured is called again when it is replayed, with the
same tensors. As on a real device, a capture must not wait for the device, and numbers that the host computed meanwhile
are repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field
from torch.utils._pytree import tree_leaves

Call = tuple[Callable[..., Any], Any, dict[str, Any], Any]
"""A function, its arguments, and what it returned."""


@define(eq=False)
class PretendGraph:
    """Takes the place of torch.cuda.CUDAGraph. run: calls a torch function on the pretend device."""

    run: Callable[..., Any]
    calls: list[Call] = field(factory=list)
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        for function, args, kwargs, result in self.calls:
            again = self.run(function, args, kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    with torch._C.DisableTorchFunction():
                        _data(old).copy_(_data(new))


class PretendGraphs:
    """The functions of torch.cuda that have to do with graphs. recording: the graph that is being captured."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self.recording: PretendGraph | None = None
        self.made: list[PretendGraph] = []

    def make(self) -> PretendGraph:
        self.made.append(PretendGraph(self._run))
        return self.made[-1]

    @contextmanager
    def capture(
        self, graph: PretendGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        self.recording = graph
        try:
            yield
        finally:
            self.recording = None

    def record(self, call: Call, wait: str | None) -> None:
        """Record a call, if a graph is being captured. wait: where the host waits for the device in this call."""
        if self.recording is None:
            return
        if wait is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {wait}")
        self.recording.calls.append(call)


def _data(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "data_on_cpu", tensor)
    return found
