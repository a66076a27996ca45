"""Measured times of drafting, by the number of requests."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from specdec_core.budget.recent import NUM_NEEDED, Recent

NUM_SKIPPED = 2
"""First measurements of each size, which may include compiling."""
NUM_BETWEEN = 4
"""Once as many are kept as there may be, one of this many measurements is: a mean without outliers takes as long as a
small draft."""
MOST_AGE = 256
"""Of measurements, in steps."""


@define
class _Size:
    """Batches of similar size. mean_s: at a load of 1; None until there are enough measurements. measured_at: the step
    of the last one."""

    recent: Recent = field(factory=lambda: Recent(MOST_AGE))
    num_added: int = 0
    mean_s: float | None = None
    measured_at: int = 0


class Clock:
    """The mean of the newest measured seconds, without outliers, for batches of similar size (up to a factor of 2).

    load: how slow the machine is at present (`CostCurve.load`). A draft that was measured long ago would seem cheap
        beside a forward pass that takes longer now, as the draft would, too.
    """

    def __init__(self, load: Callable[[], float] = lambda: 1.0) -> None:
        self._load, self._sizes = load, dict[int, _Size]()

    def add(self, batch_size: int, seconds: float, step: int) -> None:
        """Count a measurement. step: the number of the step in which it was made."""
        size = self._sizes.setdefault(batch_size.bit_length(), _Size())
        size.num_added += 1
        if size.num_added <= NUM_SKIPPED or (size.num_added % NUM_BETWEEN and size.recent.is_full(step)):
            return
        size.recent.add(seconds / self._load(), step)
        size.measured_at = step
        needed = NUM_NEEDED if size.mean_s is None else 1  # a retry may be the first measurement for long
        size.mean_s = size.recent.mean(step, needed) or size.mean_s

    def seconds(self, batch_size: int) -> float:
        """The time for a batch; if none of its size was measured, that of the nearest smaller size. 0 while there are
        too few measurements of any: a method is tried before it is judged, also at a size that is smaller than all
        before, which larger ones would make seem too dear to try."""
        for size in range(batch_size.bit_length(), -1, -1):
            if size in self._sizes and (mean_s := self._sizes[size].mean_s) is not None:
                return mean_s * self._load()
        return 0.0

    def recent_seconds(self, batch_size: int, step: int) -> float:
        """The same, but 0 if the last measurement of this size was made long before this step: what seemed too dear
        would never be measured again."""
        size = self._sizes.get(batch_size.bit_length())
        is_old = size is not None and size.num_added > NUM_SKIPPED and size.measured_at <= step - MOST_AGE
        return 0.0 if is_old else self.seconds(batch_size)
