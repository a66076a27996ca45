"""The time of a step but for drafting as a function of its number of tokens, kept current while the engine runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from math import ceil, log
from statistics import median

import numpy as np

from specdec_core.budget.recent import Recent

MOST_AGE = 128
"""Of measurements, in measured steps."""
NUM_BETWEEN = 32
"""Measured steps between two updates of the table."""
NUM_REFRESHED = 8
"""Measured steps after which the table may be updated earlier."""
NUM_UNMEASURED = 32
"""Measured steps after which a number of tokens counts as not measured lately, or never."""
NUM_NEEDED = 3
"""Measurements that it takes to correct the table. Older ones than MOST_AGE are used where a size is measured so rarely
that there are no others, as if they had been taken under the present load."""
DOUBTFUL = 1.5
"""By how many times the load has to change until sizes that were not measured since are doubtful."""
NOISE, OF_SIZES, NEWEST_WEIGHT = 0.063, 0.027, 0.1
"""Where sizes are measured, and none of those that were before, the load of the machine may have changed, or the cost
of these sizes in comparison with others. The change (of its logarithm) is shared out by the variance that either has:
NOISE at first for the machine, then what repeated measurements of the same sizes show, with NEWEST_WEIGHT for the
newest; OF_SIZES for the sizes, where the rest adds up if it is always the same."""
COLD_S, LEAST_COLD, MOST_COLD = 0.012, 2, 20
"""For so many seconds, and for a number of steps within these bounds, plain steps take longer after a draft, on a CPU:
the first twice as long if they are short, the next ones a quarter, and the last ones still a tenth."""


class CostCurve:
    """Estimates the seconds that a step takes, without drafting, from the number of tokens in the forward pass.

    The shape of the curve is measured when the engine is built. Steps that the engine runs correct it: for numbers of
    tokens of similar size (a bin), by the mean ratio of the steps' times to the curve. A bin that never had a step
    takes the ratio of its neighbors. If a bin had none lately, its ratio changes by as much as those of the others. So
    the estimates follow longer contexts, sampling parameters and the load of the machine. A single step counts where it
    is far below the estimate: an interruption makes steps slower, and nothing makes them faster.

    measured: seconds by number of tokens, for one or more numbers.
    max_tokens: the most tokens of a forward pass.

    Attributes: seconds float64 [max_tokens + 1], by number of tokens; it never falls. load: by how many times all steps
    have become slower, whatever their size; only its changes mean anything.
    """

    def __init__(self, measured: Mapping[int, float], max_tokens: int) -> None:
        self._sizes = np.array(list(sizes_up_to(max_tokens)))  # of the bins
        self._logs = np.log(np.arange(1, max_tokens + 1))
        self._recent = [Recent(MOST_AGE) for _ in self._sizes]
        self._newest = [deque[float](maxlen=NUM_NEEDED) for _ in self._sizes]  # ratios, divided by the load
        self._ratios: dict[int, float] = {}  # of the bins that were measured
        self.load, self._noise = 1.0, NOISE
        self._load_at: dict[int, float] = {}  # of each bin: when it was last measured
        self._last: list[int] = []  # the bins that were measured before the last update
        self._empty = Recent(MOST_AGE)
        self._num_steps = self._corrected_at = 0
        self._measured_at = [0] * len(self._sizes)  # of each bin: the last step
        self._base = _never_falling(_interpolated(measured, max_tokens))
        bins = np.abs(np.subtract.outer(self._logs, np.log(self._sizes))).argmin(axis=1)
        self._expected = list(zip(bins.tolist(), self._base[1:].tolist(), strict=True))  # of each number of tokens
        self.seconds = self._base

    def add(self, num_tokens: int, seconds: float, number: int = 1) -> None:
        """Correct the curve by a step, or by the mean of a number of steps in a row. NUM_NEEDED of these suffice."""
        nearest, expected_s = self._expected[num_tokens - 1]
        self._num_steps += number - 1
        for _ in range(min(number, NUM_NEEDED)):
            self._recent[nearest].add(seconds / expected_s, self._num_steps + 1)
            self._newest[nearest].append(seconds / expected_s / self.load)
        self._measured_at[nearest] = self._num_steps + 1
        self._count_step()

    def add_empty(self, num_tokens: int, seconds: float) -> None:
        """Count a step for which a proposer was asked, and had no draft token: the forward pass is slower than that of
        a plain step, since other code has run before it."""
        self._empty.add(seconds - float(self.seconds[num_tokens]), self._num_steps + 1)
        self._count_step()

    def refresh(self) -> None:
        """Update the table already now: a decision depends on it, and the load of the machine may just have changed."""
        if self._num_steps >= self._corrected_at + NUM_REFRESHED:
            self._correct()

    @property
    def empty_s(self) -> float:
        """By how many seconds a step's forward pass is slower after a proposer was asked in vain."""
        return max(0.0, self._empty.mean(self._num_steps) or 0.0)

    def at(self, num_tokens: int) -> float:
        """The seconds of a step with so many tokens. Several proposers' drafts may come to more than the table has."""
        return float(self.seconds[min(num_tokens, len(self.seconds) - 1)])

    def more_s(self, num_tokens: int, more: int) -> float:
        """The seconds that `more` tokens add to a forward pass of num_tokens."""
        return self.at(num_tokens + more) - self.at(num_tokens)

    def num_cold(self, num_tokens: int) -> int:
        """How many plain steps of so many tokens take longer after a draft."""
        return min(max(ceil(COLD_S / self.at(num_tokens)), LEAST_COLD), MOST_COLD)

    def is_out_of_date(self, num_tokens: int) -> bool:
        """Whether many steps were measured since the last one of about so many tokens."""
        return self._measured_at[self._bin(num_tokens)] <= self._num_steps - NUM_UNMEASURED

    def is_doubtful(self, num_tokens: int) -> bool:
        """Whether steps of other sizes have become so much slower, or faster, since the last one of about so many
        tokens, that it may not be true of these, too."""
        change = self.load / self._load_at.get(self._bin(num_tokens), self.load)
        return not 1 / DOUBTFUL < change < DOUBTFUL

    def _bin(self, num_tokens: int) -> int:
        nearest: int = self._expected[min(num_tokens, len(self._expected)) - 1][0]
        return nearest

    def _count_step(self) -> None:
        self._num_steps += 1
        if self._num_steps >= self._corrected_at + NUM_BETWEEN:
            self._correct()

    def _correct(self) -> None:
        last, self._corrected_at = self._corrected_at, self._num_steps
        measured = [i for i, at in enumerate(self._measured_at) if at > last]
        means = {i: self._recent[i].mean(self._num_steps, NUM_NEEDED) for i in measured}
        fresh = {i: ratio for i, ratio in means.items() if ratio is not None}
        rare = {i: ratio for i in measured if i not in fresh and (ratio := self._ratio_of_few(i)) is not None}
        if not fresh and not rare:
            return
        changes = {i: ratio / self._ratios[i] for i, ratio in fresh.items() if i in self._ratios}
        # Where drafting starts or stops, all other sizes are measured than before.
        stayed = [changes[i] for i in self._last if i in changes]
        if stayed:
            change = median(stayed)
            self._noise += NEWEST_WEIGHT * (log(change) ** 2 - self._noise)
        else:
            change = median(changes.values() or [1.0]) ** (self._noise / (self._noise + OF_SIZES))
        self.load *= change
        self._ratios = {i: ratio * change for i, ratio in (self._ratios | rare).items()} | fresh
        self._load_at |= dict.fromkeys([*fresh, *rare], self.load)
        self._last = list(fresh) or self._last
        known = sorted(self._ratios)
        of_each = np.interp(self._logs, np.log(self._sizes[known]), [self._ratios[i] for i in known])
        self.seconds = _never_falling(self._base * np.concatenate([of_each[:1], of_each]))

    def _ratio_of_few(self, nearest: int) -> float | None:
        """The ratio of a bin that had fewer steps lately than are needed; None: too little is known."""
        newest, size = self._newest[nearest], self._sizes[nearest]
        last = newest[-1] * self.load
        if last * DOUBTFUL < self.seconds[size] / self._base[size]:
            return last
        return median(newest) * self.load if len(newest) == NUM_NEEDED else None


def sizes_up_to(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, up to `most`."""
    size = 1
    while size <= most:
        yield size
        if size > 1 and size + size // 2 <= most:
            yield size + size // 2
        size *= 2


def _never_falling(seconds: np.ndarray) -> np.ndarray:
    """Lower what is above a later value: single measurements may be too slow, and none is too fast."""
    lowered: np.ndarray = np.minimum.accumulate(seconds[::-1])[::-1]
    return lowered


def _interpolated(measured: Mapping[int, float], max_tokens: int) -> np.ndarray:
    """The measured curve at 0 to max_tokens tokens. Beyond the largest measured size it goes on as a line."""
    sizes = np.array(sorted(measured))
    numbers, seconds = np.arange(max_tokens + 1), _never_falling(np.array([measured[size] for size in sizes.tolist()]))
    curve: np.ndarray = np.interp(numbers, sizes, seconds)
    if max_tokens > sizes[-1]:
        last = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else seconds[-1]
        curve = np.where(numbers > sizes[-1], seconds[-1] + last * (numbers - sizes[-1]), curve)
    return curve
