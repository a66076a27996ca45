"""CUDA graphs of functions of tensors, such as a model's forward pass: a function's kernels are launched as one, which
spares the host most of its work.

A graph repeats what was launched while it was captured, with the same shapes and addresses. So inputs are padded to a
few sizes, and a graph reads them from buffers. Whatever else a model, or a plugin's operation, takes from the host
would be repeated, too. Therefore a graph is used only after its results had the bits of the function's usual call, for
other inputs than those that it was captured with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from attrs import define, field

from specdec_core.models.graph_buffers import Buffer, Buffers
from specdec_core.models.graph_inputs import LEAST_KEYS, Call, Inputs, Shape, Tensors
from specdec_core.models.graph_memory import MOST_GRAPHS
from specdec_core.models.memory_errors import is_lack_of_memory
from specdec_core.models.same_bits import have_same_bits
from specdec_core.ops.download import Download

logger = logging.getLogger(__name__)

Run = Callable[[Call], Tensors]
"""A function. Its first result has `Call.num_rows` rows. The others have a row for each token, as all have without that
number."""
NUM_CHECKS = 2
"""Results of a graph that are compared before it is used."""
_CAPTURING = Lock()
"""Held while a graph is captured. Threads share the allocator of GPU memory, which keeps one capture's memory apart."""


@define(eq=False)
class Graph:
    """A captured call. results: to which it copies its results. tried: the inputs of the capture or of the last try,
    until the graph is trusted. checks: of each try, whether the results had the bits of the usual call, and whether the
    inputs were those before; bool [2] on its way to the host. num_right: tries with other inputs that were right."""

    inputs: Inputs
    cuda_graph: torch.cuda.CUDAGraph
    results: tuple[Buffer, ...]
    tried: Tensors
    checks: list[Download] = field(factory=list)
    num_right: int = 0

    def replay(self, call: Call) -> Tensors:
        """The next replay overwrites the graph's results, so these are copies."""
        self.tried = ()
        return tuple(result.clone() for result in self._replay(call))

    def attempt(self, call: Call) -> tuple[Tensors, torch.Tensor]:
        """Replay, to compare the results, which the next replay overwrites. Returns also whether the inputs are those
        of the last try, bool []."""
        results = self._replay(call)
        is_repeated = self.inputs.match(self.tried)
        self.tried = self.inputs.copied()
        return results, is_repeated

    def _replay(self, call: Call) -> Tensors:
        self.inputs.read(call)
        self.cuda_graph.replay()
        first, *others = self.results
        num_tokens = len(call.tensors[0])
        num_rows = num_tokens if call.num_rows is None else call.num_rows
        return first.rows[:num_rows], *(each.rows[:num_tokens] for each in others)

    def was_wrong(self) -> bool:
        """Look at the checks that have arrived. One that was right shows nothing if its inputs were those before."""
        waiting = []
        for check in self.checks:
            if (found := check.get()) is None:
                waiting.append(check)
            elif not found[0]:
                return True
            else:
                self.num_right += int(not found[1])
        self.checks = waiting
        return False

    @property
    def is_trusted(self) -> bool:
        return self.num_right >= NUM_CHECKS


class Pool:
    """Memory in which graphs compute. They may share it, since results are copied before the next replay. buffers: what
    they read and write. stream: on which they are captured, of the device that is current then; torch's own default is
    of the first device that ever captured."""

    def __init__(self) -> None:
        self.buffers = Buffers()

    @cached_property
    def handle(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class Graphs:
    """Runs a function's calls, of up to the largest of NUM_TOKENS, as CUDA graphs. A graph is captured when a call of
    its shape is first made, for which the host waits; it does not wait for checks.

    run: what it computes may depend on its call and on weights only.
    what: the function, for the log, such as "a model".
    pool: memory that functions share which never run at the same time.
    max_model_len: of the requests whose keys and values the function's attention reads.

    Attributes: num_calls, of which num_replayed were replays, and num_tried captured a graph or checked one. is_off:
    whether the function was found not to fit for graphs.
    """

    _TOO_LARGE, _TOO_MANY = "there is too little memory", "there are MOST_GRAPHS"

    def __init__(self, run: Run, what: str, pool: Pool | None = None, max_model_len: int = 0) -> None:
        self._run, self._what, self.pool = run, what, pool or Pool()
        self._num_keys = 0  # for which block tables are wide enough
        self.allow_length(max_model_len)
        self._graphs: dict[Shape, Graph] = {}
        self._refused: dict[Shape, str] = {}  # and why
        self.is_off = False
        self.num_calls = self.num_replayed = self.num_tried = 0

    def allow_length(self, max_model_len: int) -> None:
        """Make graphs' block tables wide enough for requests of this length, up to LEAST_KEYS."""
        self._num_keys = max(self._num_keys, min(max_model_len, LEAST_KEYS))

    def __call__(self, call: Call) -> Tensors:
        self.num_calls += 1
        shape = None if self.is_off else Shape.of(call, self._num_keys)
        if shape is None:
            return self._run(call)
        graph = self._graphs.get(shape)
        if graph is not None and self._is_trusted(graph):
            self.num_replayed += 1
            return graph.replay(call)
        # The usual call comes last: what a wrong graph wrote to the KV cache is overwritten.
        found = self._tried(shape, graph, call)
        results = self._run(call)
        if graph is not None and found is not None:
            self._check(graph, *found, results)
        return results

    def _is_trusted(self, graph: Graph) -> bool:
        if not graph.is_trusted and graph.was_wrong():
            self._turn_off("a graph of it gave other results than its usual call")
        return graph.is_trusted

    def _tried(self, shape: Shape, graph: Graph | None, call: Call) -> tuple[Tensors, torch.Tensor] | None:
        """Capture the graph of a shape, or return its results for a call, as long as they have to be checked, and
        whether the call has the inputs of the one before."""
        if self.is_off or shape in self._refused:
            return None
        try:
            if graph is None:
                kept = self._as_wide_as(shape)
                if len(kept) >= MOST_GRAPHS:
                    self._refuse_further(shape)
                    return None
                self.num_tried += 1
                with _CAPTURING:
                    kept[shape] = self._capture(shape, call)
                self._graphs = kept
                if shape.plan is not None:
                    self._num_keys = shape.plan.max_blocks * shape.plan.block_size
            elif graph.num_right + len(graph.checks) < NUM_CHECKS:
                self.num_tried += 1
                return graph.attempt(call)
        except Exception as error:  # of whatever code the model and plugins have; the usual call follows
            if not is_lack_of_memory(error):
                self._turn_off(f"it cannot be captured: {error}")
            else:
                self._refuse(shape, error)
        return None

    def _refuse_further(self, shape: Shape) -> None:
        if self._TOO_MANY not in self._refused.values():
            logger.info("no further CUDA graphs are captured for %s: there are %d", self._what, MOST_GRAPHS)
        self._refused[shape] = self._TOO_MANY

    def _refuse(self, shape: Shape, error: Exception) -> None:
        if self._TOO_LARGE not in self._refused.values():
            logger.warning(
                "the GPU has too little memory for a CUDA graph of %s with %d tokens, so such calls launch each kernel "
                "by itself, and take longer. Lower gpu_memory_utilization, or set enforce_eager=True: %s",
                self._what,
                shape.num_tokens,
                str(error).partition("\n")[0],
            )
        self._refused[shape] = self._TOO_LARGE
        self._graphs.pop(shape, None)

    def _as_wide_as(self, shape: Shape) -> dict[Shape, Graph]:
        """The graphs whose block tables are no narrower. Once there is a graph of this shape, the others are not used:
        from then on, all graphs have tables of its width."""
        least = 0 if shape.plan is None else shape.plan.max_blocks
        return {key: graph for key, graph in self._graphs.items() if key.plan is None or key.plan.max_blocks >= least}

    def _check(self, graph: Graph, found: Tensors, is_repeated: torch.Tensor, results: Tensors) -> None:
        try:
            graph.checks.append(Download(torch.stack([have_same_bits(found, results), is_repeated])))
        except Exception as error:  # of results that are no tensors, or of another number
            self._turn_off(f"its results cannot be compared: {error}")

    def _capture(self, shape: Shape, call: Call) -> Graph:
        device, buffers, cuda_graph = call.tensors[0].device, self.pool.buffers, torch.cuda.CUDAGraph()
        inputs = Inputs.of(shape, buffers, device)
        inputs.read(call)
        # This run compiles kernels, which must not happen while it is captured.
        results = tuple(
            buffers.get(("result", index), each.dtype, each.shape[1:], device)
            for index, each in enumerate(self._run(inputs.call(call.plan)))
        )
        options: Any = {"pool": self.pool.handle, "stream": self.pool.stream, "capture_error_mode": "thread_local"}
        # A capture that fails leaves its stream current: the outer context restores the usual one.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(cuda_graph, **options):
            # Copied, so that what is computed need not be kept: the next graph computes in the same memory.
            for buffer, result in zip(results, self._run(inputs.call(call.plan)), strict=True):
                buffer.rows[: len(result)].copy_(result)
        return Graph(inputs, cuda_graph, results, inputs.copied())

    def _turn_off(self, reason: str) -> None:
        self.is_off = True
        self._graphs.clear()
        advice = "enforce_eager=True does without from the start"
        logger.info("no CUDA graphs are used for %s: %s. %s", self._what, reason, advice)
