"""Measured times of drafting, by the number of requests."""

from __future__ import annotations

from specdec_core.budget.recent import NUM_NEEDED, Recent

NUM_SKIPPED = 2
"""First measurements of each size, which may include compiling."""
NUM_BETWEEN = 4
"""Once as many are kept as there may be, one of this many measurements is: a mean without outliers takes as
long as a small draft."""
MOST_AGE = 256
"""Of measurements, in steps."""


class Clock:
    """The mean of the newest measured seconds, without outliers, for batches of similar size (up to a factor of 2)."""

    def __init__(self) -> None:
        self._recent: dict[int, Recent] = {}
        self._num_skipped: dict[int, int] = {}
        self._usual: dict[int, float] = {}
        self._measured: dict[int, int] = {}  # by size: the step of the last measurement
        self._num_added: dict[int, int] = {}

    def add(self, batch_size: int, seconds: float, step: int) -> None:
        """Count a measurement. step: the number of the step in which it was made."""
        size = batch_size.bit_length()
        number = self._num_added[size] = self._num_added.get(size, -1) + 1
        if number % NUM_BETWEEN and size in self._recent and self._recent[size].is_full(step):
            return
        if self._num_skipped.get(size, 0) < NUM_SKIPPED:
            self._num_skipped[size] = self._num_skipped.get(size, 0) + 1
            return
        recent = self._recent.setdefault(size, Recent(MOST_AGE))
        recent.add(seconds, step)
        self._measured[size] = step
        needed = 1 if size in self._usual else NUM_NEEDED  # a retry may be the first measurement for long
        if (found := recent.mean(step, needed)) is not None:
            self._usual[size] = found

    def seconds(self, batch_size: int) -> float:
        """The time for a batch; if none of its size was measured, that of the nearest smaller size. 0 while there are
        too few measurements of any: a method is tried before it is judged, also at a size that is smaller than all
        before, which larger ones would make seem too dear to try."""
        size = batch_size.bit_length()
        smaller = [known for known in self._usual if known <= size]
        return self._usual[max(smaller)] if smaller else 0.0

    def recent_seconds(self, batch_size: int, step: int) -> float:
        """The same, but 0 if the last measurement of this size was made long before this step: what seemed too dear
        would never be measured again."""
        last = self._measured.get(batch_size.bit_length())
        return 0.0 if last is not None and last <= step - MOST_AGE else self.seconds(batch_size)
