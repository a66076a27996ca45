"""Moves accepted draft tokens' keys and values to their final slots, in all layers of a group at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_core.ops.compaction import compact as reference

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What numbers of so many bytes are moved as: no bit of theirs changes."""
MOVES, PART = 16, 256
"""Slots that are read before one is written, and numbers of a slot that one program moves."""


def compact(keys: torch.Tensor, values: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """As `specdec_core.ops.compaction.compact`, which takes caches whose slots are not contiguous."""
    num_moves, caches = len(source), (keys, values)
    if not num_moves:
        return
    if not all(each[0, 0].is_contiguous() for each in caches):
        reference(keys, values, source, destination)
        return
    widths = [each.shape[2] * each.shape[3] for each in caches]
    key_parts, value_parts = (triton.cdiv(width, PART) for width in widths)
    _move[(len(keys), key_parts + value_parts)](
        *(each.view(INTEGERS[each.itemsize]) for each in caches),
        source.contiguous(),
        destination.contiguous(),
        num_moves,
        *keys.stride()[:2],
        *values.stride()[:2],
        *widths,
        KEY_PARTS=key_parts,
        MOVES=MOVES,
        PART=PART,
    )


@triton.jit(do_not_specialize=["num_moves"])
def _move(
    keys_at,
    values_at,
    source_at,
    destination_at,
    num_moves,
    keys_layer_stride,
    keys_slot_stride,
    values_layer_stride,
    values_slot_stride,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    MOVES: tl.constexpr,
    PART: tl.constexpr,
):
    """One part of each slot, of the keys or of the values of one layer."""
    layer, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part < KEY_PARTS:
        keys_at += layer * keys_layer_stride + part * PART
        left = KEY_WIDTH - part * PART
        _move_part(keys_at, source_at, destination_at, num_moves, keys_slot_stride, left, MOVES, PART)
    else:
        values_at += layer * values_layer_stride + (part - KEY_PARTS) * PART
        left = VALUE_WIDTH - (part - KEY_PARTS) * PART
        _move_part(values_at, source_at, destination_at, num_moves, values_slot_stride, left, MOVES, PART)


@triton.jit
def _move_part(
    part_at, source_at, destination_at, num_moves, slot_stride, left, MOVES: tl.constexpr, PART: tl.constexpr
):
    """In order, so that a slot is read before it is written. left: numbers of a slot from this part on."""
    column = tl.arange(0, PART)[None, :]
    for first in range(0, num_moves, MOVES):
        move = first + tl.arange(0, MOVES)[:, None]
        is_move = move < num_moves
        source = tl.load(source_at + move, mask=is_move, other=0)
        destination = tl.load(destination_at + move, mask=is_move, other=0)
        is_there = is_move & (column < left)
        moved = tl.load(part_at + source * slot_stride + column, mask=is_there)
        tl.debug_barrier()  # what one thread writes, another may have to read before
        tl.store(part_at + destination * slot_stride + column, moved, mask=is_there)
