"""CUDA graphs of a model's forward pass: its kernels are launched as one, which spares the host most of its work.

A graph repeats what was launched while it was captured, with the same shapes and addresses. So inputs are padded to a
few sizes, and a graph reads them from buffers of its own. Whatever else a model, or a plugin's operation, takes from
the host would be repeated, too. Therefore a graph is used only after its results had the bits of the usual forward
pass, for other inputs than those that it was captured with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, frozen

from specdec_core.contracts.kv import Visibility
from specdec_core.ops.attention_plan import WORD, AttentionPlan, FixedPlan
from specdec_core.ops.padding import round_up

logger = logging.getLogger(__name__)

Result = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""Logits [num_rows, vocab] and hidden states {tap: [num_tokens, width]}."""
Given = tuple[torch.Tensor, torch.Tensor, AttentionPlan, torch.Tensor]
"""Token ids, positions, plan and rows of a forward pass."""
NUM_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sizes to which forward passes are padded. Beside the work of larger ones, launching their kernels costs little."""
NUM_CHECKS = 2
"""Results of a graph that are compared before it is used."""


@frozen
class Shape:
    """What differs between graphs. num_paths: width of `Visibility.more_slots`; 0: no trees."""

    num_tokens: int
    max_blocks: int
    block_size: int
    num_paths: int
    num_tree_slots: int
    window: int | None


@frozen(eq=False)
class Inputs:
    """One forward pass, or the buffers that a graph reads. `read` pads with zeros, and slots with -1."""

    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    rows: torch.Tensor  # int64 [num_tokens]   only the first have a meaning
    slot_mapping: torch.Tensor  # int64 [num_tokens]
    prefix_lens: torch.Tensor  # int64 [num_tokens]
    more_slots: torch.Tensor  # int64 [num_tokens, num_paths]
    token_requests: torch.Tensor  # int32 [num_tokens]
    context_lens: torch.Tensor  # int32 [num_tokens]   of requests, which are no more than tokens
    block_tables: torch.Tensor  # int64 [num_tokens, max_blocks]   of requests

    @classmethod
    def empty(cls, shape: Shape, device: torch.device) -> Inputs:
        def zeros(*more: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape.num_tokens, *more, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(),
            positions=zeros(),
            rows=zeros(),
            slot_mapping=zeros(),
            prefix_lens=zeros(),
            more_slots=zeros(shape.num_paths),
            token_requests=zeros(dtype=torch.int32),
            context_lens=zeros(dtype=torch.int32),
            block_tables=zeros(shape.max_blocks),
        )

    def read(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, rows: torch.Tensor) -> None:
        """Copy a forward pass into these buffers. What is left over is padding."""
        metadata, seen = plan.metadata, plan.visibility
        _fill(self.token_ids, token_ids)
        _fill(self.positions, positions)
        _fill(self.rows, rows)
        _fill(self.slot_mapping, metadata.slot_mapping, -1)
        _fill(self.prefix_lens, seen.prefix_lens)
        if seen.more_slots is not None:
            width = seen.more_slots.shape[1]
            self.more_slots[:, :width].zero_()
            self.more_slots[: len(seen.more_slots), :width] = seen.more_slots
            self.more_slots[:, width:] = self.more_slots[:, width - 1 : width]  # the last slot of a path repeats
        _fill(self.token_requests, plan.token_requests, -1)
        _fill(self.context_lens, plan.context_lens)
        tables = metadata.block_tables
        self.block_tables[: len(tables), : tables.shape[1]] = tables

    def plan(self, shape: Shape, like: AttentionPlan) -> FixedPlan:
        return FixedPlan.of(
            like,
            Visibility(
                self.positions,
                self.prefix_lens,
                self.more_slots if shape.num_paths else None,
                shape.num_tree_slots,
            ),
            slot_mapping=self.slot_mapping,
            block_tables=self.block_tables,
            token_requests=self.token_requests,
            context_lens=self.context_lens,
        )


def _fill(buffer: torch.Tensor, values: torch.Tensor, padding: int = 0) -> None:
    buffer[: len(values)] = values
    buffer[len(values) :].fill_(padding)


@define(eq=False)
class Graph:
    """A captured forward pass. num_checks: results that had the bits of the usual pass."""

    inputs: Inputs
    cuda_graph: torch.cuda.CUDAGraph
    result: Result
    num_checks: int = 0

    def replay(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, rows: torch.Tensor
    ) -> Result:
        """The next replay overwrites the graph's results, so these are copies."""
        self.inputs.read(token_ids, positions, plan, rows)
        self.cuda_graph.replay()
        logits, features = self.result
        return logits[: len(rows)].clone(), {tap: each[: len(token_ids)].clone() for tap, each in features.items()}


class ForwardGraphs:
    """Runs a model's forward passes, of up to the largest of NUM_TOKENS, as CUDA graphs. A graph is captured when a
    forward pass of its shape is first run.

    run: computes logits and features from token ids, positions, rows, and the plan and the window of attention.

    Attributes: num_passes, and num_replayed of them.
    """

    def __init__(
        self, run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan, int | None], Result]
    ) -> None:
        self._run = run
        self._graphs: dict[Shape, Graph] = {}
        self._pool: Any = None
        self._is_off = False
        self.num_passes = self.num_replayed = 0

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        rows: torch.Tensor,
        window: int | None,
    ) -> Result:
        """Run one forward pass. token_ids, positions: int64 [num_tokens]. rows: int64 [num_rows]."""
        given = token_ids, positions, plan, rows
        self.num_passes += 1
        shape = None if self._is_off else _shape_of(plan, len(rows), window)
        if shape is not None and (graph := self._graphs.get(shape)) and graph.num_checks >= NUM_CHECKS:
            self.num_replayed += 1
            return graph.replay(*given)
        result = self._run(token_ids, positions, rows, plan, window)
        if shape is not None:
            try:
                self._prepare(shape, given, result)
            except Exception as error:  # of whatever code the model and plugins have; what matters is the result above
                self._turn_off(f"its forward pass cannot be captured: {error}")
        return result

    def _prepare(self, shape: Shape, given: Given, result: Result) -> None:
        """Capture the graph of a shape, or check it by the result of a forward pass."""
        graph = self._graphs.get(shape)
        if graph is None:
            self._graphs[shape] = self._capture(shape, given)
        elif _are_same(graph.replay(*given), result):
            graph.num_checks += 1
        else:
            self._turn_off("a graph of it gave other results than the forward pass")

    def _capture(self, shape: Shape, given: Given) -> Graph:
        token_ids, _, plan, _ = given
        inputs, cuda_graph = Inputs.empty(shape, token_ids.device), torch.cuda.CUDAGraph()
        inputs.read(*given)
        self._pool = self._pool or torch.cuda.graph_pool_handle()

        def run() -> Result:
            fixed = inputs.plan(shape, plan)
            return self._run(inputs.token_ids, inputs.positions, inputs.rows, fixed, shape.window)

        run()  # compiles kernels, which must not happen while it is captured
        with torch.cuda.graph(cuda_graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return Graph(inputs, cuda_graph, result)

    def _turn_off(self, reason: str) -> None:
        self._is_off = True
        self._graphs.clear()
        logger.info("no CUDA graphs are used for a model: %s. enforce_eager=True does without from the start", reason)


def _shape_of(plan: AttentionPlan, num_rows: int, window: int | None) -> Shape | None:
    """The shape of the graph for a forward pass; None: it is too large, or the host does not know its sizes."""
    seen, tables = plan.visibility, plan.metadata.block_tables
    num_tokens = next((size for size in NUM_TOKENS if size >= len(seen.positions)), None)
    if num_tokens is None or max(num_rows, len(tables)) > num_tokens:
        return None
    num_paths = num_tree_slots = 0
    if seen.more_slots is not None:
        if seen.num_tree_slots is None:
            return None
        num_paths, num_tree_slots = _power_of_2(seen.more_slots.shape[1]), round_up(seen.num_tree_slots, WORD)
    return Shape(num_tokens, _power_of_2(tables.shape[1]), plan.metadata.block_size, num_paths, num_tree_slots, window)


def _power_of_2(number: int) -> int:
    """The next one that is at least as large."""
    return 1 << (number - 1).bit_length() if number else 0


def _are_same(found: Result, expected: Result) -> bool:
    pairs = [(found[0], expected[0]), *((found[1][tap], expected[1][tap]) for tap in expected[1])]
    return all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in pairs)
