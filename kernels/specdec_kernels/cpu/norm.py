"""Root mean square norm in one pass over memory."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core import ops
from specdec_kernels.cpu.bits import DTYPES, FAST, as_array, as_stored, compiled, load


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `specdec_core.ops.norm.rms_norm`. The sum of squares is added up in another order."""
    if hidden.dtype != weight.dtype or hidden.dtype not in DTYPES:
        return ops.REFERENCE["rms_norm"](hidden, weight, eps)
    rows = hidden.contiguous().view(-1, hidden.shape[-1])
    output = torch.empty_like(rows)
    _rms_norm(as_array(rows), as_array(weight), eps, as_array(output))
    return output.view(hidden.shape)


@compiled(fastmath=FAST)
def _rms_norm(hidden, weight, eps, output):
    """hidden and output [num_rows, width], weight [width]."""
    num_rows, width = hidden.shape
    for row in range(num_rows):
        squares = np.float32(0)
        for i in range(width):
            number = load(hidden[row, i])
            squares += number * number
        scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
        for i in range(width):
            normed = load(as_stored(output, load(hidden[row, i]) * scale))
            output[row, i] = as_stored(output, normed * load(weight[i]))
