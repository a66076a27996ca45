"""Rotary position embedding (Su et al. 2021) of queries and keys in one pass."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core import ops
from specdec_kernels.cpu.bits import DTYPES, as_array, as_stored, compiled, load


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec_core.ops.rotary.rotary`."""
    dtypes = {tensor.dtype for tensor in (query, key, cos, sin)}
    if len(dtypes) > 1 or not dtypes <= DTYPES:
        return ops.REFERENCE["rotary"](query, key, cos, sin)
    angles = as_array(cos[0].contiguous()), as_array(sin[0].contiguous())
    return _rotated(query, *angles), _rotated(key, *angles)


def _rotated(heads: torch.Tensor, cos: np.ndarray, sin: np.ndarray) -> torch.Tensor:
    """heads [1, num_heads, num_tokens, width]; the result has the tokens first in memory, as attention reads them."""
    tokens_first = heads[0].transpose(0, 1).contiguous()
    output = torch.empty_like(tokens_first)
    _rotate(as_array(tokens_first), cos, sin, as_array(output))
    return output.transpose(0, 1).unsqueeze(0)


@compiled()
def _rotate(heads, cos, sin, output):
    """heads and output [num_tokens, num_heads, width], cos and sin [num_tokens, width]. Every product and the sum are
    rounded to the arrays' type, as torch rounds them."""
    num_tokens, num_heads, width = heads.shape
    half = width // 2
    for token in range(num_tokens):
        for head in range(num_heads):
            for i in range(half):
                j = i + half
                a, b = load(heads[token, head, i]), load(heads[token, head, j])
                a_cos = load(as_stored(output, a * load(cos[token, i])))
                a_sin = load(as_stored(output, a * load(sin[token, j])))
                b_cos = load(as_stored(output, b * load(cos[token, j])))
                b_sin = load(as_stored(output, b * load(sin[token, i])))
                output[token, head, i] = as_stored(output, a_cos - b_sin)
                output[token, head, j] = as_stored(output, b_cos + a_sin)
