"""Pads forward passes so that a token's result does not depend on how many tokens and keys are computed with it.

The order in which a matrix product sums depends on its shape. If shapes are multiples of the numbers in `Padding`, a
CPU sums in the same order whether a forward pass computes one token or a tree. So plain and speculative decoding agree
to the last bit. `docs/architecture.md` has the measurements.
"""

from __future__ import annotations

import torch
from attrs import frozen


@frozen
class Padding:
    """The multiples to which the shapes of a forward pass are padded.

    rows: multiple for the number of tokens and for the number of query rows in attention.
    keys: multiple for the number of KV-cache slots that attention reads.
    """

    rows: int
    keys: int

    @classmethod
    def of(cls, device: torch.device) -> Padding:
        """Return the multiples for a device. torch's CPU kernels process 4 rows at a time, and 512 keys of attention.
        For GPUs it is not known which multiples would make a token's result independent of the other tokens."""
        return cls(rows=4, keys=512) if device.type == "cpu" else cls(rows=1, keys=64)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def padded_to(length: int, rows: torch.Tensor, value: int = 0) -> torch.Tensor:
    """Pad rows [n, ...] at the end with `value`, up to `length` rows. Returns `rows` itself if n is `length`."""
    missing = length - rows.shape[0]
    return torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing), value=value) if missing else rows
