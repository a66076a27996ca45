"""Counter-based random numbers: each draw is a hash of its keys (the request's seed, the position and others), so it
does not depend on the batch or on earlier draws.

The hash is splitmix64 (Steele, Lea and Flood 2014): the n-th output of the generator whose state is a hash of the seed.
The other keys, packed into an integer, are n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from specdec_core.contracts.verifier import Stream
from specdec_core.ops.drawing import draw
from specdec_core.ops.upload import upload

Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_NODE_BITS = 24


class CounterRandom:
    """The engine's `RandomSource`, made anew for each step.

    seeds: int64 [batch], each request's seed.
    root_positions: int64 [batch], the position of each request's last token (the root of its draft tree).
    draw: the operation `draw`.
    """

    def __init__(self, seeds: Sequence[int] | torch.Tensor, root_positions: torch.Tensor, draw: Draw = draw) -> None:
        self._seeds, self._root_positions, self._draw = seeds, root_positions, draw

    @cached_property
    def _states(self) -> torch.Tensor:
        """int64 [batch]   the hashed seeds. They are computed when a step first draws, since greedy steps draw
        nothing."""
        return _mix(upload(self._seeds, self._root_positions.device, torch.int64))

    def target_token(self, weights: torch.Tensor, requests: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        positions = self._root_positions[requests] + depths + 1
        return self._draw(weights, self._uniform(Stream.TARGET, requests, positions, torch.zeros_like(requests)))

    def categorical(
        self, weights: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        return self._draw(weights, self._uniform(stream, requests, self._root_positions[requests], nodes))

    def bernoulli(
        self, prob: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        return self._uniform(stream, requests, self._root_positions[requests], nodes) < prob

    def _uniform(
        self, stream: Stream, requests: torch.Tensor, positions: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        """Uniform random numbers, float64 [n] in [0, 1). Each is determined by its request's seed, position (below
        2**36), stream (what it is drawn for) and `nodes` (a number below 2**24 that differs between draws of a
        stream)."""
        counter = ((positions * len(Stream) + stream) << _NODE_BITS) + nodes
        bits = _mix(self._states[requests] + counter * _GOLDEN)
        return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch's own shift of int64 copies the sign
