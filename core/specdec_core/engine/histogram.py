"""Histograms of how long requests wait, as metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from attrs import define, field, frozen

BOUNDS_S = tuple(step * 10.0**power for power in range(-3, 3) for step in (1, 2, 5))
"""Upper bounds of the buckets, 1 ms to 500 s. Longer times are in the last bucket, which has none."""


@frozen
class Histogram:
    """A metric that counts times, in seconds, by upper bounds. As in Prometheus, a bucket counts all times up to its
    bound: buckets is {bound, as text: count}, and the last bound is "+Inf"."""

    name: str
    count: int
    sum: float
    buckets: dict[str, int]

    @property
    def value(self) -> float:
        """The mean in seconds; 0 without any."""
        return self.sum / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Return the time that this many percent of the times do not exceed, in seconds; 0 without any.

        It is interpolated within a bucket, as Prometheus' histogram_quantile does, and at most the highest bound.
        """
        if not self.count:
            return 0.0
        rank, below, start = self.count * percent / 100, 0, 0.0
        for text, up_to in self.buckets.items():
            end = min(float(text), BOUNDS_S[-1])
            if up_to > below and up_to >= rank:
                break
            below, start = up_to, end
        return start + (end - start) * (rank - below) / (up_to - below)


@define
class Times:
    """Counts times by the buckets of a `Histogram`."""

    sum: float = 0.0
    _counts: list[int] = field(factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: Sequence[float]) -> None:
        for each in seconds:
            self._counts[bisect_left(BOUNDS_S, each)] += 1
            self.sum += each

    def histogram(self, name: str) -> Histogram:
        up_to = list(accumulate(self._counts))
        bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
        return Histogram(name, up_to[-1], self.sum, dict(zip(bounds, up_to, strict=True)))
