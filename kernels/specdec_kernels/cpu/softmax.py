"""The part of softmax before the division: exponentials of attention scores, and their sum. And the sigmoid, which
shares the exponential."""

from __future__ import annotations

import numpy as np

from specdec_kernels.cpu.bits import bits_to_float, inner
from specdec_kernels.cpu.reductions import highest_of, multiply_add, sum_and_store
from specdec_kernels.cpu.tiles import TILE

_LOG2_E = np.float32(1.4426950408889634)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(87.0)
"""exp of them are normal float32."""


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
    for j in range(len(seen)):
        seen[j] = _exp(seen[j] - highest)
    scores[first_tile:first] = 0
    scores[end:] = 0
    total = sum_and_store(scores, first_tile, len(scores), weights, first_tile)
    return total + _exp(sink - highest) if sink > -np.inf else total


@inner()
def _exp(x):
    """Return exp(x) in float32 for x <= 87, with a relative error below 3e-7. It is computed as 2**n times a Taylor
    polynomial of degree 7 on [-ln 2 / 2, ln 2 / 2], without branches, so that compilers can vectorize it."""
    x = min(max(x, _LOWEST), _HIGHEST)
    n = np.int32(x * _LOG2_E + np.float32(127.5)) - np.int32(127)  # the nearest: conversion rounds towards 0
    r = multiply_add(np.float32(n), np.float32(-0.693359375), x)
    r = multiply_add(np.float32(n), np.float32(2.12194440e-4), r)
    p = np.float32(1.0 / 5040.0)
    p = multiply_add(p, r, np.float32(1.0 / 720.0))
    p = multiply_add(p, r, np.float32(1.0 / 120.0))
    p = multiply_add(p, r, np.float32(1.0 / 24.0))
    p = multiply_add(p, r, np.float32(1.0 / 6.0))
    p = multiply_add(p, r, np.float32(0.5))
    p = multiply_add(p, r, np.float32(1))
    p = multiply_add(p, r, np.float32(1))
    return p * bits_to_float((n + np.int32(127)) << np.int32(23))


@inner(error_model="numpy")  # a check for division by zero would keep loops from being vectorized
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), float32."""
    return np.float32(1) / (np.float32(1) + _exp(-x))
