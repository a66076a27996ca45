"""The part of softmax before the division: exponentials of attention scores, and their sum."""

from __future__ import annotations

import numpy as np

from specdec_kernels.cpu.bits import inner
from specdec_kernels.cpu.exponential import exp, exp_of_differences
from specdec_kernels.cpu.reductions import highest_of, sum_and_store
from specdec_kernels.cpu.tiles import TILE


@inner()
def exp_and_sum(scores, first, end, softcap, sink, weights):
    """Compute the softmax weights, before the division, of scores[first:end]. The softcap is applied to scores, then
    each becomes exp(score - highest score). Weights from `end` on are 0, and so are those before `first` in the same
    tile. Returns their sum, including the attention sink's.

    scores: float32, whole tiles; overwritten.
    weights: written, rounded to their dtype; as long as the scores.
    softcap: scores become softcap * tanh(scores / softcap). 0: no softcap.
    sink: the score of the attention sink. -inf: no sink.

    All roundings are explicit, so that the bits are the same in every loop that this is compiled into.
    """
    seen = scores[first:end]
    if softcap > 0:
        for j in range(len(seen)):
            seen[j] = np.float32(softcap * np.tanh(seen[j] / softcap))
    first_tile = first // TILE * TILE
    scores[first_tile:first] = -np.inf
    scores[end:] = -np.inf
    highest = highest_of(scores, first_tile, len(scores), sink)
    exp_of_differences(scores, first_tile, len(scores), highest)
    scores[first_tile:first] = 0
    scores[end:] = 0
    total = sum_and_store(scores, first_tile, len(scores), weights, first_tile)
    return total + exp(sink - highest) if sink > -np.inf else total
