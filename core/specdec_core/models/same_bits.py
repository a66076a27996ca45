"""Compares results bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

AT_ONCE = 2**22
"""Numbers that are compared at once: comparing takes a few bytes for each of them."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def have_same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether all numbers have the same bits, as a bool on their device. Any NaN is the same as any other.
    Raises ValueError if there are other shapes or dtypes, or another number of tensors."""
    pairs = [*zip(found, expected, strict=True)]
    for one, other in pairs:
        if one.shape != other.shape or one.dtype != other.dtype:
            raise ValueError(
                f"the graph's result is {one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}"
            )
    return torch.stack([_are_same(one, other) for one, other in pairs]).all()


def _are_same(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    pieces = zip(*(torch.split(each.reshape(-1), AT_ONCE) for each in (found, expected)), strict=True)
    return torch.stack([_are_same_at_once(one, other) for one, other in pieces]).all()


def _are_same_at_once(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    integers = INTEGERS[found.dtype.itemsize]
    are_same = found.view(integers) == expected.view(integers)
    if found.is_floating_point():
        are_same |= found.isnan() & expected.isnan()
    return are_same.all()
