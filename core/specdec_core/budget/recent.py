"""Means of recent measurements."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

NUM_KEPT, NUM_NEEDED = 15, 5
"""The newest measurements that are kept, and how many it takes."""
OUTLIER = 2.5
"""Measurements count as at most this many times the median, so that single slow ones hardly do. The median alone would
be too low: most of what is slow now and then is slow in drafting, and drafts that find something take twice as long as
those that do not."""


class Recent:
    """The newest measurements of one thing.

    most_age: those that are older than this many steps are dropped, since the load of the machine may have changed.
    """

    def __init__(self, most_age: int) -> None:
        self._newest: deque[tuple[int, float]] = deque(maxlen=NUM_KEPT)
        self._most_age = most_age

    def is_full(self, step: int) -> bool:
        """Whether there are as many as are kept, as of a step."""
        self._drop_old(step)
        return len(self._newest) == NUM_KEPT

    def add(self, value: float, step: int) -> None:
        """step: the number of the step in which it was measured."""
        self._newest.append((step, value))

    def mean(self, step: int, needed: int = NUM_NEEDED) -> float | None:
        """The mean as of a step; None if there are fewer measurements than needed."""
        self._drop_old(step)
        if len(self._newest) < max(1, needed):
            return None
        values = [value for _, value in self._newest]
        most = OUTLIER * abs(median(values))
        return sum(min(value, most) for value in values) / len(values)

    def quick(self, step: int, needed: int = NUM_NEEDED) -> float | None:
        """The first quartile as of a step: the time if nothing interrupts it. None: as for `mean`."""
        self._drop_old(step)
        return quick(value for _, value in self._newest) if len(self._newest) >= max(1, needed) else None

    def _drop_old(self, step: int) -> None:
        while self._newest and self._newest[0][0] <= step - self._most_age:
            self._newest.popleft()


class Average:
    """A mean in which new values count more than old ones: by `weight`, or more while there are few.

    value: the mean; until there is one, a guess.
    """

    def __init__(self, guess: float, weight: float) -> None:
        self.value, self._weight, self._number = guess, weight, 0

    def add(self, value: float) -> None:
        self._number += 1
        self.value += max(self._weight, 1 / self._number) * (value - self.value)


def quick(values: Iterable[float]) -> float:
    """The first quartile: a quarter of these times are shorter."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4]
