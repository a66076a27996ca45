"""Shapes that make every row independent of how many rows and keys are computed with it.

Matrix products sum in an order that depends on their shapes. With these multiples a CPU sums alike whether a pass
computes one token or a tree, so plain and speculative decoding agree to the last bit. `docs/architecture.md` says how
this was measured.
"""

from __future__ import annotations

import torch
from attrs import frozen


@frozen
class Padding:
    """rows: tokens of a pass, and query rows of attention. keys: key slots of attention."""

    rows: int
    keys: int

    @classmethod
    def of(cls, device: torch.device) -> Padding:
        """On a CPU, torch's kernels take rows by four and attention's keys by 512. On a GPU no such numbers hold."""
        return cls(rows=4, keys=512) if device.type == "cpu" else cls(rows=1, keys=64)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def padded_to(length: int, rows: torch.Tensor, value: int = 0) -> torch.Tensor:
    """rows [n, ...] with as many more of one value as make them `length`; as they are where none are missing."""
    missing = length - len(rows)
    return torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing), value=value) if missing else rows
