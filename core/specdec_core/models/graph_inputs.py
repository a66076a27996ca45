"""The inputs of functions that run as CUDA graphs. A graph reads them from buffers, and has one of a few sizes."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
from attrs import frozen

from specdec_core.contracts.kv import Visibility
from specdec_core.models.graph_buffers import NUM_TOKENS, Buffer, Buffers, Copies
from specdec_core.models.same_bits import have_same_bits
from specdec_core.ops.attention_plan import WORD, AttentionPlan, FixedPlan
from specdec_core.ops.padding import round_up
from specdec_core.ops.upload import upload_into

Tensors = tuple[torch.Tensor, ...]
LEAST_KEYS = 8192
"""KV-cache slots of a request for which every graph's block tables are wide enough, if the model has as many positions.
So few graphs are outgrown. Attention has partial results of all slots of the tables, so that wider ones take memory."""


@frozen(eq=False)
class Call:
    """One call of a function.

    tensors: [num_tokens, ...] each; all but the first may have fewer rows.
    plan: of the function's attention; None: it computes no attention. There are as many tokens.
    window: of the function's attention.
    fixed: what else the function depends on. Each window and each value has graphs of its own.
    num_rows: of the function's first result; None: as many as tokens, as the other results have.
    """

    tensors: Tensors
    plan: AttentionPlan | None = None
    window: int | None = None
    fixed: Hashable = None
    num_rows: int | None = None


@frozen
class PlanShape:
    """What differs between the plans of graphs. num_paths: width of `Visibility.more_slots`; 0: no trees."""

    max_blocks: int
    block_size: int
    num_paths: int
    num_tree_slots: int

    @classmethod
    def of(cls, plan: AttentionPlan, least_keys: int) -> PlanShape | None:
        """The shape into which a plan fits; None: the host does not know its sizes."""
        seen, metadata = plan.visibility, plan.metadata
        num_paths = num_tree_slots = 0
        if seen.more_slots is not None:
            if seen.num_tree_slots is None:
                return None
            num_paths, num_tree_slots = power_of_2(seen.more_slots.shape[1]), round_up(seen.num_tree_slots, WORD)
        max_blocks = -(-max(plan.most_keys, least_keys) // metadata.block_size)
        return cls(power_of_2(max_blocks), metadata.block_size, num_paths, num_tree_slots)


@frozen
class Shape:
    """What differs between graphs of a function. rows: of each tensor, the dtype and the sizes after the first. window,
    fixed: as of a `Call`. plan: None: no attention."""

    num_tokens: int
    rows: tuple[tuple[torch.dtype, torch.Size], ...]
    window: int | None
    fixed: Hashable
    plan: PlanShape | None

    @classmethod
    def of(cls, call: Call, least_keys: int = 0) -> Shape | None:
        """The shape of the graph for a call; None: it is too large or empty, or the host does not know its sizes.
        least_keys: for which block tables are wide enough."""
        lengths, plan = [len(each) for each in call.tensors], call.plan
        num_tokens = next((size for size in NUM_TOKENS if size >= lengths[0]), None)
        num_requests = 0 if plan is None else len(plan.metadata.block_tables)
        if num_tokens is None or not lengths[0] or max(*lengths, num_requests) > num_tokens:
            return None
        of_plan = None
        if plan is not None:
            of_plan = PlanShape.of(plan, least_keys) if len(plan.visibility.positions) == lengths[0] else None
            if of_plan is None:
                return None
        rows = tuple((each.dtype, each.shape[1:]) for each in call.tensors)
        return cls(num_tokens, rows, call.window, call.fixed, of_plan)


@frozen(eq=False)
class PlanInputs:
    """The inputs of an attention plan. Padding is 0, that of slots and of tokens' requests -1. Block tables have none:
    what is left in them of other calls is not read."""

    num_tokens: int
    positions: Buffer  # int64 [num_tokens or more]
    slot_mapping: Buffer  # int64 [num_tokens or more]
    prefix_lens: Buffer  # int64 [num_tokens or more]
    more_slots: Buffer  # int64 [num_tokens or more, num_paths]
    block_tables: Buffer  # int64 [num_tokens or more, max_blocks]   of requests, which are no more than tokens
    requests: Buffer  # int32 [num_tokens or more, 2]   its memory is read as [2, num_tokens], see `of_requests`

    @classmethod
    def of(cls, buffers: Buffers, num_tokens: int, shape: PlanShape, device: torch.device) -> PlanInputs:
        sizes = {"more_slots": (shape.num_paths,), "block_tables": (shape.max_blocks,)}
        made = {
            name: buffers.get(name, torch.int64, sizes.get(name, ()), device, -1 if name == "slot_mapping" else 0)
            for name in ("positions", "slot_mapping", "prefix_lens", "more_slots", "block_tables")
        }
        return cls(num_tokens, **made, requests=buffers.get("requests", torch.int32, (2,), device))

    @property
    def of_requests(self) -> torch.Tensor:
        """int32 [2, num_tokens]   `AttentionPlan.token_requests` and `context_lens`. A call writes it as a whole."""
        return self.requests.rows.view(-1)[: 2 * self.num_tokens].view(2, -1)

    def read(self, plan: AttentionPlan, copies: Copies) -> None:
        metadata, seen = plan.metadata, plan.visibility
        copies.fill(self.positions, seen.positions)
        copies.fill(self.slot_mapping, metadata.slot_mapping)
        copies.fill(self.prefix_lens, seen.prefix_lens)
        if seen.more_slots is not None:
            copies.fill(self.more_slots, _widened(seen.more_slots, self.more_slots.rows.shape[1]))
        tables = metadata.block_tables[:, : self.block_tables.rows.shape[1]]  # no token reads what lies beyond
        copies.put(self.block_tables.rows[: len(tables), : tables.shape[1]], tables)
        context_lens = np.zeros(self.num_tokens, dtype=np.int32)
        context_lens[: len(tables)] = np.add(metadata.starts, metadata.lengths)
        upload_into(self.of_requests, np.stack([plan.host_token_requests(self.num_tokens), context_lens]))

    def padded(self) -> Tensors:
        """All but block tables. Where these differ, slots differ, too."""
        buffers = self.positions, self.slot_mapping, self.prefix_lens, self.more_slots
        return *(each.rows[: self.num_tokens] for each in buffers), self.of_requests

    def plan(self, shape: PlanShape, like: AttentionPlan) -> FixedPlan:
        """The plan that reads these tensors. like: a plan of the same model."""
        positions, slot_mapping, prefix_lens, more_slots, of_requests = self.padded()
        return FixedPlan.of(
            like,
            Visibility(positions, prefix_lens, more_slots if shape.num_paths else None, shape.num_tree_slots),
            slot_mapping=slot_mapping,
            block_tables=self.block_tables.rows[: self.num_tokens],
            token_requests=of_requests[0],
            context_lens=of_requests[1],
        )


@frozen(eq=False)
class Inputs:
    """What a graph reads: tensors, and those of a plan, if the function attends."""

    shape: Shape
    buffers: tuple[Buffer, ...]
    plan: PlanInputs | None

    @classmethod
    def of(cls, shape: Shape, buffers: Buffers, device: torch.device) -> Inputs:
        tensors = tuple(buffers.get(index, *row, device) for index, row in enumerate(shape.rows))
        plan = None if shape.plan is None else PlanInputs.of(buffers, shape.num_tokens, shape.plan, device)
        return cls(shape, tensors, plan)

    def read(self, call: Call) -> None:
        """Copy the inputs of a call of this shape. What is left over is padding."""
        copies = Copies()
        for buffer, values in zip(self.buffers, call.tensors, strict=True):
            copies.fill(buffer, values)
        if self.plan is not None and call.plan is not None:
            self.plan.read(call.plan, copies)
        copies.run()

    def tensors(self) -> Tensors:
        """[num_tokens, ...] each."""
        return tuple(each.rows[: self.shape.num_tokens] for each in self.buffers)

    def copied(self) -> Tensors:
        """All that was read but block tables, padding included."""
        return tuple(each.clone() for each in self._all())

    def match(self, copied: Tensors) -> torch.Tensor:
        """Whether what was read has the same bits, bool []."""
        return have_same_bits(self._all(), copied)

    def _all(self) -> Tensors:
        return *self.tensors(), *(() if self.plan is None else self.plan.padded())

    def call(self, like: AttentionPlan | None) -> Call:
        """The call of the function with these tensors. like: a plan of the same model."""
        shape = self.shape
        plan = self.plan.plan(shape.plan, like) if self.plan and shape.plan and like else None
        return Call(self.tensors(), plan, shape.window, shape.fixed)


def _widened(slots: torch.Tensor, width: int) -> torch.Tensor:
    """Repeat the last slot of each path."""
    missing = width - slots.shape[1]
    return torch.cat([slots, slots[:, -1:].expand(-1, missing)], dim=1) if missing else slots


def power_of_2(number: int) -> int:
    """The next one that is at least as large."""
    return 1 << (number - 1).bit_length() if number else 0
