"""The inputs of functions that run as CUDA graphs. A graph reads buffers of its own, of a few sizes."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from attrs import fields, frozen

from specdec_core.contracts.kv import Visibility
from specdec_core.ops.attention_plan import WORD, AttentionPlan, FixedPlan
from specdec_core.ops.padding import round_up

Tensors = tuple[torch.Tensor, ...]
NUM_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sizes to which forward passes are padded. Beside the work of larger ones, launching their kernels costs little."""


@frozen(eq=False)
class Call:
    """One call of a function.

    tensors: [num_tokens, ...] each; all but the first may have fewer rows.
    plan: of the function's attention; None: it computes no attention. There are as many tokens.
    fixed: what else the function depends on. Each value has graphs of its own.
    num_rows: of the function's first result; None: as many as tokens, as the other results have.
    """

    tensors: Tensors
    plan: AttentionPlan | None = None
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
    def of(cls, plan: AttentionPlan) -> PlanShape | None:
        """The shape into which a plan fits; None: the host does not know its sizes."""
        seen, metadata = plan.visibility, plan.metadata
        num_paths = num_tree_slots = 0
        if seen.more_slots is not None:
            if seen.num_tree_slots is None:
                return None
            num_paths, num_tree_slots = _power_of_2(seen.more_slots.shape[1]), round_up(seen.num_tree_slots, WORD)
        return cls(_power_of_2(metadata.block_tables.shape[1]), metadata.block_size, num_paths, num_tree_slots)


@frozen
class Shape:
    """What differs between graphs of a function. rows: of each tensor, the dtype and the sizes after the first. fixed:
    as of a `Call`. plan: None: no attention."""

    num_tokens: int
    rows: tuple[tuple[torch.dtype, torch.Size], ...]
    fixed: Hashable
    plan: PlanShape | None

    @classmethod
    def of(cls, call: Call) -> Shape | None:
        """The shape of the graph for a call; None: it is too large or empty, or the host does not know its sizes."""
        lengths, plan = [len(each) for each in call.tensors], call.plan
        num_tokens = next((size for size in NUM_TOKENS if size >= lengths[0]), None)
        num_requests = 0 if plan is None else len(plan.metadata.block_tables)
        if num_tokens is None or not lengths[0] or max(*lengths, num_requests) > num_tokens:
            return None
        of_plan = None
        if plan is not None:
            of_plan = PlanShape.of(plan) if len(plan.visibility.positions) == lengths[0] else None
            if of_plan is None:
                return None
        return cls(num_tokens, tuple((each.dtype, each.shape[1:]) for each in call.tensors), call.fixed, of_plan)


@frozen(eq=False)
class PlanInputs:
    """The tensors of an attention plan. `read` pads with zeros, and slots and owners with -1."""

    positions: torch.Tensor  # int64 [num_tokens]
    slot_mapping: torch.Tensor  # int64 [num_tokens]
    prefix_lens: torch.Tensor  # int64 [num_tokens]
    more_slots: torch.Tensor  # int64 [num_tokens, num_paths]
    token_requests: torch.Tensor  # int32 [num_tokens]
    context_lens: torch.Tensor  # int32 [num_tokens]   of requests, which are no more than tokens
    block_tables: torch.Tensor  # int64 [num_tokens, max_blocks]   of requests

    @classmethod
    def empty(cls, num_tokens: int, shape: PlanShape, device: torch.device) -> PlanInputs:
        widths = {"more_slots": (shape.num_paths,), "block_tables": (shape.max_blocks,)}
        short = ("token_requests", "context_lens")
        return cls(
            **{
                name: torch.zeros(
                    num_tokens,
                    *widths.get(name, ()),
                    dtype=torch.int32 if name in short else torch.int64,
                    device=device,
                )
                for name in (field.name for field in fields(cls))
            }
        )

    def read(self, plan: AttentionPlan) -> None:
        metadata, seen = plan.metadata, plan.visibility
        _fill(self.positions, seen.positions)
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

    def plan(self, shape: PlanShape, like: AttentionPlan) -> FixedPlan:
        """The plan that reads these tensors. like: a plan of the same model."""
        more_slots = self.more_slots if shape.num_paths else None
        return FixedPlan.of(
            like,
            Visibility(self.positions, self.prefix_lens, more_slots, shape.num_tree_slots),
            slot_mapping=self.slot_mapping,
            block_tables=self.block_tables,
            token_requests=self.token_requests,
            context_lens=self.context_lens,
        )


@frozen(eq=False)
class Inputs:
    """The buffers that a graph reads: tensors [num_tokens, ...], and those of a plan, if the function attends."""

    shape: Shape
    tensors: Tensors
    plan: PlanInputs | None

    @classmethod
    def empty(cls, shape: Shape, device: torch.device) -> Inputs:
        tensors = (torch.zeros(shape.num_tokens, *sizes, dtype=dtype, device=device) for dtype, sizes in shape.rows)
        plan = None if shape.plan is None else PlanInputs.empty(shape.num_tokens, shape.plan, device)
        return cls(shape, tuple(tensors), plan)

    def read(self, call: Call) -> None:
        """Copy the inputs of a call of this shape. What is left over is padding."""
        for buffer, values in zip(self.tensors, call.tensors, strict=True):
            _fill(buffer, values)
        if self.plan is not None and call.plan is not None:
            self.plan.read(call.plan)

    def read_next(self, call: Call) -> torch.Tensor:
        """As `read`. Returns whether the call has other inputs than the one that was read before, bool [] on their
        device."""
        buffers = [*self.tensors]
        if self.plan is not None:
            buffers += [getattr(self.plan, field.name) for field in fields(PlanInputs)]
        before = [buffer.clone() for buffer in buffers]
        self.read(call)
        return torch.stack([(old != new).any() for old, new in zip(before, buffers, strict=True)]).any()

    def call(self, like: AttentionPlan | None) -> Call:
        """The call of the function with these buffers. like: a plan of the same model."""
        if self.plan is None or self.shape.plan is None or like is None:
            return Call(self.tensors, None, self.shape.fixed)
        return Call(self.tensors, self.plan.plan(self.shape.plan, like), self.shape.fixed)


def _fill(buffer: torch.Tensor, values: torch.Tensor, padding: int = 0) -> None:
    number = len(values)
    buffer[:number] = values
    if number < len(buffer):
        buffer[number:].fill_(padding)


def _power_of_2(number: int) -> int:
    """The next one that is at least as large."""
    return 1 << (number - 1).bit_length() if number else 0
