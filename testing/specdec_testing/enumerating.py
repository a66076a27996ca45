"""A random source that enumerates all outcomes of a function's random draws, to get their exact probabilities."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import torch
from attrs import define, field

from specdec_core.contracts.verifier import Stream

Result = TypeVar("Result")


class Split(Exception):  # noqa: N818
    """Raised by a random draw that has several possible outcomes.

    key: identifies the draw. point: the noise value that separates the first possible outcome from the others.
    """

    def __init__(self, key: Hashable, point: float) -> None:
        self.key, self.point = key, point


@define
class EnumeratingRandom:
    """A random source for exact enumeration. The noise of a draw is an interval in [0, 1) instead of a number.

    A draw returns the token at which the cumulative weights exceed the noise. If several tokens are possible, it raises
    Split.

    Draws with the same key (stream, request, node or depth) share their noise, as in the engine. So a verifier that
    uses one draw twice gives wrong probabilities.
    """

    intervals: dict[Hashable, tuple[float, float]] = field(factory=dict)
    used: set[Hashable] = field(factory=set)

    @property
    def probability(self) -> float:
        product = 1.0
        for low, high in self.intervals.values():
            product *= high - low
        return product

    def target_token(self, weights: torch.Tensor, requests: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        keys: list[Hashable] = [("target", r, d) for r, d in zip(requests.tolist(), depths.tolist(), strict=True)]
        return self._draw(weights, keys)

    def categorical(
        self, weights: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        return self._draw(weights, [(stream, r, i) for r, i in zip(requests.tolist(), nodes.tolist(), strict=True)])

    def bernoulli(
        self, prob: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        return self.categorical(torch.stack([prob, 1 - prob], -1), stream, requests, nodes) == 0

    def _draw(self, weights: torch.Tensor, keys: list[Hashable]) -> torch.Tensor:
        assert weights.shape[0] == len(keys)
        assert weights.dtype == torch.float64, "proofs are done in float64: keep the logits' precision"
        return torch.tensor(
            [self._draw_one(row, key) for row, key in zip(weights.tolist(), keys, strict=True)], dtype=torch.int64
        )

    def _draw_one(self, weights: list[float], key: Hashable) -> int:
        low, high = self.intervals.get(key, (0.0, 1.0))
        self.used.add(key)
        support = [i for i, weight in enumerate(weights) if weight > 0]
        total, cumulative = sum(weights), 0.0
        for index in support[:-1]:
            cumulative += weights[index] / total
            if high <= cumulative:
                return index
            if low < cumulative:
                raise Split(key, cumulative)
        return support[-1]


def enumerate_outcomes(step: Callable[[EnumeratingRandom], Result]) -> Iterator[tuple[float, Result]]:
    """Yield (probability, result of `step`) for every outcome of the random draws in `step`.

    step: a function that takes a random source and draws from no other.
    """
    pending: list[dict[Hashable, tuple[float, float]]] = [{}]
    while pending:
        intervals = pending.pop()
        random = EnumeratingRandom(dict(intervals))
        try:
            result = step(random)
        except Split as split:
            low, high = intervals.get(split.key, (0.0, 1.0))
            pending += [{**intervals, split.key: (low, split.point)}, {**intervals, split.key: (split.point, high)}]
        else:
            yield random.probability, result
