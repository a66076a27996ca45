"""Draws tokens by given random numbers: sums of parts of a row first, then the place within one part."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core import compiled, ops
from specdec_kernels.cpu.bits import inner

PART, NUM_SUMS = 512, 8
"""Weights of a part, and how many sums of it are computed side by side: each addition waits for the one before."""


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The compiled form of `specdec_core.ops.drawing.draw`, which sums weights in another order, but also in float64.
    Calls the reference implementation for weights that are not float32."""
    if weights.dtype != torch.float32:
        return ops.REFERENCE["draw"](weights, uniform)
    tokens = torch.empty(len(weights), dtype=torch.int64)
    _draw(weights.contiguous().numpy(), uniform.contiguous().numpy(), tokens.numpy())
    return tokens


@inner()
def _sum(weights):
    sums, whole = np.zeros(NUM_SUMS), len(weights) // NUM_SUMS * NUM_SUMS
    for i in range(0, whole, NUM_SUMS):
        for j in range(NUM_SUMS):
            sums[j] += weights[i + j]
    total = 0.0
    for each in sums:
        total += each
    for weight in weights[whole:]:
        total += weight
    return total


@inner()
def _draw_row(weights, uniform):
    num_parts = (len(weights) + PART - 1) // PART
    sums = np.empty(num_parts)
    total = 0.0
    for part in range(num_parts):
        sums[part] = _sum(weights[part * PART : (part + 1) * PART])
        total += sums[part]
    # Rounding must not reach the total itself.
    threshold = min(uniform * total, np.nextafter(total, 0.0))
    part, below = 0, 0.0
    while part < num_parts - 1 and not below + sums[part] > threshold:
        below += sums[part]
        part += 1
    # The weights one by one may be rounded to less than the part's sum: then it is the last one.
    token = part * PART
    for i in range(part * PART, min((part + 1) * PART, len(weights))):
        if weights[i] > 0:
            token, below = i, below + weights[i]
            if below > threshold:
                break
    return token


@compiled("(f4[:,::1], f8[::1], i8[::1])")
def _draw(weights, uniform, tokens):
    for row in range(len(weights)):
        tokens[row] = _draw_row(weights[row], uniform[row])
