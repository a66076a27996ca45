"""Measured times of drafting, by the number of requests."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from specdec_core.budget.recent import Recent

NUM_SKIPPED, NUM_NEEDED = 2, 3
"""First measurements, which may include compiling, and how many further ones it takes to know a time."""
SKIPPED_LATER, NEEDED_LATER = 1, 2
"""The same where the time of batches of another size is known."""
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
        self._nearest: dict[int, tuple[_Size, float]] = {}  # of each size that was asked for, until another is known

    def add(self, batch_size: int, seconds: float, step: int) -> None:
        """Count a measurement. step: the number of the step in which it was made."""
        bits = batch_size.bit_length()
        if (size := self._sizes.get(bits)) is None:
            size = self._sizes[bits] = _Size()
        size.num_added += 1
        if size.num_added % NUM_BETWEEN and size.recent.is_full(step):
            return
        is_first = all(each.mean_s is None for each in self._sizes.values())
        skipped, needed = (NUM_SKIPPED, NUM_NEEDED) if is_first else (SKIPPED_LATER, NEEDED_LATER)
        if size.num_added <= skipped:
            return
        size.recent.add(seconds / self._load(), step)
        size.measured_at = step
        if size.mean_s is None:
            self._nearest.clear()
        else:
            needed = 1  # a retry may be the first measurement for long
        size.mean_s = size.recent.mean(step, needed) or size.mean_s

    def knows(self, batch_size: int) -> bool:
        """Whether the time for batches of this size was measured."""
        size = self._sizes.get(batch_size.bit_length())
        return size is not None and size.mean_s is not None

    def seconds(self, batch_size: int) -> float:
        """The time for a batch; 0 if none is known. If none of its size was measured, it is the least that it may be:
        that of the nearest smaller size, or else, of the nearest larger one, the share of its requests. A size that
        seemed too dear would never be tried."""
        own = batch_size.bit_length()
        if own not in self._nearest:
            self._nearest[own] = self._find(own)
        size, share = self._nearest[own]
        return (size.mean_s or 0.0) * self._load() * share

    def _find(self, own: int) -> tuple[_Size, float]:
        """The measured size that tells most about one, as `bit_length`, and the share of its time."""
        known = [size for size, each in self._sizes.items() if each.mean_s is not None]
        if not known:
            return _Size(), 0.0
        nearest = max((size for size in known if size <= own), default=min(known))
        return self._sizes[nearest], 2.0 ** -max(0, nearest - own)

    def recent_seconds(self, batch_size: int, step: int) -> float:
        """The same, but 0 if the last measurement of this size was made long before this step: what seemed too dear
        would never be measured again."""
        size = self._sizes.get(batch_size.bit_length())
        is_old = size is not None and size.mean_s is not None and size.measured_at <= step - MOST_AGE
        return 0.0 if is_old else self.seconds(batch_size)
