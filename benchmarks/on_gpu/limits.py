"""The limits of a device, measured: how fast it copies, and how fast it multiplies matrices."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from on_gpu.setup import Setup
from on_gpu.timing import seconds_of


@frozen
class Limits:
    bytes_per_s: float  # read and written
    flops_per_s: float  # of bfloat16 matrix products with float32 sums

    def seconds(self, num_bytes: float, num_flops: float) -> float:
        """The least time in which the device reads and writes so many bytes and computes so much."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)

    def bound(self, num_bytes: float, num_flops: float) -> str:
        is_memory = num_bytes / self.bytes_per_s >= num_flops / self.flops_per_s
        return "memory" if is_memory else "arithmetic"


def measure_limits(setup: Setup) -> Limits:
    return Limits(_bytes_per_s(setup), _flops_per_s(setup))


def _bytes_per_s(setup: Setup) -> float:
    source = torch.ones(setup.sizes.limit_numbers, dtype=torch.bfloat16, device=setup.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), setup.device, 5 * setup.sizes.cell_s)


def _flops_per_s(setup: Setup) -> float:
    size, device = setup.sizes.limit_size, setup.device
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, device, 5 * setup.sizes.cell_s)


def limits_row(limits: Limits) -> dict[str, Any]:
    return {"gb_per_s": round(limits.bytes_per_s / 1e9, 1), "tflops_per_s": round(limits.flops_per_s / 1e12, 3)}
