"""A random source that enumerates all outcomes of a step, to get their exact probabilities."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import torch
from attrs import define, field

from specdec_core.contracts.verifier import Stream

Result = TypeVar("Result")


class Split(Exception):  # noqa: N818
    """Raised when a draw's outcome depends on where in its interval the noise of `key` lies.

    `enumerate_outcomes` then splits the interval at `point` and runs the step once for each half.
    """

    def __init__(self, key: Hashable, point: float) -> None:
        self.key, self.point = key, point


@define
class EnumeratingRandom:
    """A random source for exact enumeration: a draw's noise is known only as an interval within [0, 1).

    A draw inverts the cumulative weights at its noise, and raises Split if the interval allows several outcomes. Draws
    with the same key (stream, request, node or depth) share their noise, as in the real source, so a verifier that uses
    one draw twice is detected.
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
        keys = [("target", r, d) for r, d in zip(requests.tolist(), depths.tolist(), strict=True)]
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
    """Yield (probability, result) for every outcome of `step`, which draws only from the random source that it is
    given."""
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
