"""The tensors that CUDA graphs read and write. Graphs that run one after the other share them: a buffer is as large as
the largest graph needs, and smaller graphs use its first rows."""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakValueDictionary

import torch
from attrs import define

NUM_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sizes to which forward passes are padded. Beside the work of larger ones, launching their kernels costs little."""


@define(eq=False)
class Buffer:
    """Rows of one input or result.

    rows: [NUM_TOKENS[-1], ...].
    padding: of the same shape, with one number.
    num_filled: rows from this one on are padding. Of results: not used.
    """

    rows: torch.Tensor
    padding: torch.Tensor
    num_filled: int = 0


class Buffers:
    """The buffers of functions that never run at the same time. A buffer lives as long as a graph that uses it."""

    def __init__(self) -> None:
        self._made: WeakValueDictionary[Hashable, Buffer] = WeakValueDictionary()

    def get(
        self, name: Hashable, dtype: torch.dtype, sizes: tuple[int, ...], device: torch.device, padding: int = 0
    ) -> Buffer:
        """Return the buffer [NUM_TOKENS[-1], *sizes] of this name. padding: what its rows hold beside those of a
        call."""
        key = name, dtype, tuple(sizes)
        buffer = self._made.get(key)
        if buffer is None:
            number = NUM_TOKENS[-1]
            column = torch.full((number, *(1 for _ in sizes)), padding, dtype=dtype, device=device)
            rows = torch.full((number, *sizes), padding, dtype=dtype, device=device)
            buffer = self._made[key] = Buffer(rows, column.expand(rows.shape))
        return buffer

    @property
    def num_bytes(self) -> int:
        return sum(each.rows.numel() * each.rows.element_size() for each in self._made.values())


class Copies:
    """Copies tensors to buffers, in one launch for all of a dtype whose memory is laid out alike."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fills: list[tuple[Buffer, int]] = []

    def put(self, target: torch.Tensor, values: torch.Tensor) -> None:
        if values.numel():
            self._pairs.append((target, values))

    def fill(self, buffer: Buffer, values: torch.Tensor) -> None:
        """Put values [n, ...] into the first rows of a buffer, and padding where the call before had more rows."""
        number, before = len(values), buffer.num_filled
        self.put(buffer.rows[:number], values)
        if number < before:
            self.put(buffer.rows[number:before], buffer.padding[number:before])
        self._fills.append((buffer, number))

    def run(self) -> None:
        for buffer, number in self._fills:  # Ctrl-C may come before all is copied
            buffer.num_filled = max(buffer.num_filled, number)
        alike: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for target, values in self._pairs:
            if target.stride() == values.stride() and target.dtype == values.dtype:
                alike.setdefault(target.dtype, []).append((target, values))
            else:
                target.copy_(values)
        for pairs in alike.values():
            torch._foreach_copy_([target for target, _ in pairs], [values for _, values in pairs])
        for buffer, number in self._fills:
            buffer.num_filled = number
