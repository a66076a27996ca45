"""CUDA graphs of functions of tensors, such as a model's forward pass: a function's kernels are launched as one, which
spares the host most of its work.

A graph repeats what was launched while it was captured, with the same shapes and addresses. So inputs are padded to a
few sizes, and a graph reads them from buffers of its own. Whatever else a model, or a plugin's operation, takes from
the host would be repeated, too. Therefore a graph is used only after its results had the bits of the function's usual
call, for other inputs than those that it was captured with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from attrs import define, field

from specdec_core.models.graph_inputs import Call, Inputs, Shape, Tensors
from specdec_core.ops.download import Download

logger = logging.getLogger(__name__)

Run = Callable[[Call], Tensors]
"""A function. Its first result has `Call.num_rows` rows. The others have a row for each token, as all have without that
number."""
NUM_CHECKS = 2
"""Results of a graph that are compared before it is used."""


@define(eq=False)
class Graph:
    """A captured call. checks: of each try, whether the results had the bits of the usual call, and whether the inputs
    were other ones than those before; bool [2] on its way to the host. num_right: tries in which both was so."""

    inputs: Inputs
    cuda_graph: torch.cuda.CUDAGraph
    results: Tensors
    checks: list[Download] = field(factory=list)
    num_right: int = 0

    def replay(self, call: Call) -> Tensors:
        """The next replay overwrites the graph's results, so these are copies."""
        self.inputs.read(call)
        return self._replay(call)

    def attempt(self, call: Call) -> tuple[Tensors, torch.Tensor]:
        """Replay, to compare the results. Returns also whether the inputs are other ones than before, bool []."""
        differs = self.inputs.read_next(call)
        return self._replay(call), differs

    def _replay(self, call: Call) -> Tensors:
        self.cuda_graph.replay()
        first, *others = self.results
        num_tokens = len(call.tensors[0])
        num_rows = num_tokens if call.num_rows is None else call.num_rows
        return first[:num_rows].clone(), *(each[:num_tokens].clone() for each in others)

    def was_wrong(self) -> bool:
        """Look at the checks that have arrived. One that was right shows nothing if its inputs were those before."""
        waiting = []
        for check in self.checks:
            if (found := check.get()) is None:
                waiting.append(check)
            elif not found[0]:
                return True
            else:
                self.num_right += int(found[1])
        self.checks = waiting
        return False

    @property
    def is_trusted(self) -> bool:
        return self.num_right >= NUM_CHECKS


class Pool:
    """Memory in which graphs compute. They may share it, since results are copied before the next replay. stream: on
    which they are captured, of the device that is current then; torch's own default is of the first device that ever
    captured."""

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

    Attributes: num_calls, and num_replayed of them.
    """

    def __init__(self, run: Run, what: str, pool: Pool | None = None) -> None:
        self._run, self._what, self._pool = run, what, pool or Pool()
        self._graphs: dict[Shape, Graph] = {}
        self._is_off = False
        self.num_calls = self.num_replayed = 0

    def __call__(self, call: Call) -> Tensors:
        self.num_calls += 1
        shape = None if self._is_off else Shape.of(call)
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
        whether the call has other inputs than the one before."""
        if self._is_off:
            return None
        try:
            if graph is None:
                self._drop_narrower(shape)
                self._graphs[shape] = self._capture(shape, call)
            elif graph.num_right + len(graph.checks) < NUM_CHECKS:
                return graph.attempt(call)
        except Exception as error:  # of whatever code the model and plugins have; the usual call follows
            self._turn_off(f"it cannot be captured: {error}")
        return None

    def _drop_narrower(self, shape: Shape) -> None:
        """Free graphs for narrower block tables: tables never become narrower again."""
        if shape.plan is not None:
            least = shape.plan.max_blocks
            self._graphs = {
                key: graph for key, graph in self._graphs.items() if key.plan is None or key.plan.max_blocks >= least
            }

    def _check(self, graph: Graph, found: Tensors, differs: torch.Tensor, results: Tensors) -> None:
        try:
            graph.checks.append(Download(torch.stack([have_same_bits(found, results), differs])))
        except Exception as error:  # of results that are no tensors, or of another number
            self._turn_off(f"its results cannot be compared: {error}")

    def _capture(self, shape: Shape, call: Call) -> Graph:
        inputs, cuda_graph = Inputs.empty(shape, call.tensors[0].device), torch.cuda.CUDAGraph()
        inputs.read(call)
        self._run(inputs.call(call.plan))  # compiles kernels, which must not happen while it is captured
        options: Any = {"pool": self._pool.handle, "stream": self._pool.stream, "capture_error_mode": "thread_local"}
        # A capture that fails leaves its stream current: the outer context restores the usual one.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(cuda_graph, **options):
            results = self._run(inputs.call(call.plan))
        return Graph(inputs, cuda_graph, results)

    def _turn_off(self, reason: str) -> None:
        self._is_off = True
        self._graphs.clear()
        advice = "enforce_eager=True does without from the start"
        logger.info("no CUDA graphs are used for %s: %s. %s", self._what, reason, advice)


def have_same_bits(found: Tensors, expected: Tensors) -> torch.Tensor:
    """Return whether all numbers are the same, as a bool on their device. NaN is the same as NaN. Raises ValueError if
    there are other shapes, or another number of tensors."""
    pairs = [*zip(found, expected, strict=True)]
    if wrong := [f"{list(a.shape)}, not {list(b.shape)}" for a, b in pairs if a.shape != b.shape]:
        raise ValueError(f"the graph's result is {wrong[0]}")
    return torch.stack([((a == b) | (a.isnan() & b.isnan())).all() for a, b in pairs]).all()
