"""Padding that makes every row independent of how many rows and keys are computed with it.

The order in which a matrix product sums depends on its shape. Padded to these multiples, a CPU sums in the same order
whether a forward pass computes one token or a tree, so plain and speculative decoding agree to the last bit.
`docs/architecture.md` has the measurements.
"""

from __future__ import annotations

import torch
from attrs import frozen


@frozen
class Padding:
    """Multiples to pad to. rows: tokens of a forward pass, and query rows of attention. keys: key slots of
    attention."""

    rows: int
    keys: int

    @classmethod
    def of(cls, device: torch.device) -> Padding:
        """The multiples for a type of device. torch's CPU kernels take rows by 4 and attention's keys by 512. For GPUs
        no such numbers are known."""
        return cls(rows=4, keys=512) if device.type == "cpu" else cls(rows=1, keys=64)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def padded_to(length: int, rows: torch.Tensor, value: int = 0) -> torch.Tensor:
    """Pad rows [n, ...] with `value` to `length` rows. Returns the same tensor if none are missing."""
    missing = length - len(rows)
    return torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing), value=value) if missing else rows
