"""Measured times of drafting, by the number of requests."""

from __future__ import annotations

from collections import deque
from statistics import median

NUM_SKIPPED = 2
"""First measurements of each size, which may include compiling."""
NUM_KEPT, NUM_NEEDED = 15, 5
NUM_BETWEEN = 4
"""Once enough are kept, of this many measurements one is: the median takes as long as a small draft."""
STALE = 256
"""Measurements older than this many steps are dropped as soon as there is a newer one."""


class Clock:
    """The median of the newest measured seconds, for batches of similar size (up to a factor of 2)."""

    def __init__(self) -> None:
        self._newest: dict[int, deque[tuple[int, float]]] = {}  # (step, seconds)
        self._num_skipped: dict[int, int] = {}
        self._medians: dict[int, float] = {}

    def add(self, batch_size: int, seconds: float, step: int) -> None:
        """Count a measurement. step: the number of the step in which it was made."""
        size = batch_size.bit_length()
        if step % NUM_BETWEEN and len(self._newest.get(size, ())) == NUM_KEPT:
            return
        if self._num_skipped.get(size, 0) < NUM_SKIPPED:
            self._num_skipped[size] = self._num_skipped.get(size, 0) + 1
            return
        newest = self._newest.setdefault(size, deque(maxlen=NUM_KEPT))
        newest.append((step, seconds))
        while newest[0][0] <= step - STALE:
            newest.popleft()
        if size in self._medians or len(newest) >= NUM_NEEDED:
            self._medians[size] = median(seconds for _, seconds in newest)

    def seconds(self, batch_size: int) -> float:
        """The time for a batch; if none of its size was measured, that of the nearest size. 0 while there are too
        few measurements: a method is tried before it is judged."""
        if not self._medians:
            return 0.0
        size = batch_size.bit_length()
        if size not in self._medians:
            size = min(self._medians, key=lambda known: abs(known - size))
        return self._medians[size]
