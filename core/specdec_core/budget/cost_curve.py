"""The time of a step but for drafting as a function of its numbers of requests and of tokens, kept current while the
engine runs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from math import ceil, exp, log
from statistics import fmean, median

import numpy as np
from attrs import define, field

from specdec_core.budget.recent import Recent, quick

MOST_AGE = 128
"""Of measurements, in measured steps."""
NUM_BETWEEN = 32
"""Measured steps between two updates of the table."""
NUM_REFRESHED = 8
"""Measured steps after which the table may be updated earlier."""
NUM_UNMEASURED = 32
"""Measured steps after which plain steps of a number of requests count as not measured lately, or never."""
NUM_NEEDED = 3
"""Measurements that it takes to correct the table. Older ones than MOST_AGE are used where a size is measured so rarely
that there are no others, as if they had been taken under the present load."""
NUM_PLAIN = 32
"""Plain steps count as no longer than the first quartile of their last NUM_PLAIN measurements, however old. If they
seem slower than they are, requests go on drafting at a loss, and no plain step is run that would show it. If they seem
quicker, drafting stops, and they are measured at once."""
NUM_NEWEST = 2
"""How many bins with draft tokens have to be measured lately so that steps may take less than older ones show."""
DOUBTFUL = 1.5
"""By how many times the load has to change until sizes that were not measured since are doubtful."""
NOISE, OF_SIZES, NEWEST_WEIGHT = 0.063, 0.027, 0.1
"""Where sizes are measured, and none of those that were before, the load of the machine may have changed, or the cost
of these sizes in comparison with others. The change (of its logarithm) is shared out by the variance that either has:
NOISE at first for the machine, then what repeated measurements of the same sizes show, with NEWEST_WEIGHT for the
newest; OF_SIZES for the sizes, where the rest adds up if it is always the same."""
FIRST_GUESS = 1.0
"""What is assumed of further tokens, before some are measured, counts as much as this many plain steps of a request."""
COLD_S, LEAST_COLD, MOST_COLD = 0.012, 2, 20
"""For so many seconds, and for a number of steps within these bounds, plain steps take longer after a draft, on a CPU:
the first twice as long if they are short, the next ones a quarter, and the last ones still a tenth."""


@define
class _Bin:
    """Steps of similar size.

    num_drafted: draft tokens of the last one. newest: ratios of measured times to the curve, divided by the load.
    plain: the same of plain steps, not divided. empty: of steps for which a proposer was asked in vain, divided.
    num_new: its steps since the last correction. ratio: None until it was measured. load_at, measured_at: the load and
    the step when it was last measured.
    corrected_at: the step when the ratio was last set to what was measured.
    """

    num_drafted: int
    recent: Recent = field(factory=lambda: Recent(MOST_AGE))
    empty: Recent = field(factory=lambda: Recent(MOST_AGE))
    newest: deque[float] = field(factory=lambda: deque(maxlen=NUM_NEEDED))
    plain: deque[float] = field(factory=lambda: deque(maxlen=NUM_PLAIN))
    num_new: int = 0
    ratio: float | None = None
    load_at: float | None = None
    measured_at: int = 0
    corrected_at: int = 0


class CostCurve:
    """Estimates the seconds that a step takes, without drafting, from the number of its requests and that of the tokens
    in its forward pass.

    When the engine is built, it measures a curve by the number of tokens, with few requests. Steps that it runs correct
    the curve. They are grouped into bins, by similar numbers of requests and of draft tokens. The ratio of a bin is the
    first quartile of its steps' times, divided by the curve: interruptions make steps slower, and nothing makes them
    faster. For the same reason, a single step far below the estimate counts at once.

    - Between the bins of as many requests, the ratio is interpolated.
    - Beyond the largest of them, further tokens add what they add, at the least, with any other number of requests. The
      ratio of a plain step does not hold for them: it is high because of its requests.
    - Plain steps that were never run have the ratio of those of fewer and of more requests, or the load, if none ran.
    - Where no step of a bin ran lately, its ratio changes with that of plain steps of as many requests, or with the
      load. So the estimates follow longer contexts, sampling parameters and the load of the machine.
    - An old bin with draft tokens counts only where it is below the newest bins: what once was too dear would never be
      measured again.

    measured: seconds by number of tokens, for one or more numbers.
    max_tokens: the most tokens of a forward pass.

    Attributes: load, by how many times all steps have become slower, whatever their size, since the first correction.
    num_corrections: estimates stay the same while this does.
    """

    def __init__(self, measured: Mapping[int, float], max_tokens: int) -> None:
        self._sizes = np.array(list(sizes_up_to(max_tokens)))  # of the bins
        self._logs = np.log(np.arange(1, max_tokens + 1))
        self._bins = defaultdict[int, dict[int, _Bin]](dict)  # by the bin of the requests, and of the draft tokens
        self.load, self._noise = 1.0, NOISE
        self._last: list[_Bin] = []  # the bins that were measured before the last update
        self._empty = Recent(MOST_AGE)
        self._num_steps = self._corrected_at = self.num_corrections = 0
        self._base = _never_falling(_interpolated(measured, max_tokens))
        bins = np.abs(np.subtract.outer(self._logs, np.log(self._sizes))).argmin(axis=1)
        self._bin_of: list[int] = [0, *(1 + bins).tolist()]  # of each number; that of 0 has no other
        self._tables: dict[int, np.ndarray] = {}  # by the number of requests

    def seconds(self, num_requests: int) -> np.ndarray:
        """float64 [max_tokens + 1]   of steps of so many requests, by the number of tokens. They never fall."""
        if num_requests not in self._tables:
            self._tables[num_requests] = self._table(num_requests)
        return self._tables[num_requests]

    def add(self, num_requests: int, num_tokens: int, seconds: float, number: int = 1) -> None:
        """Correct the curve by a step, or by the mean of a number of steps in a row. NUM_NEEDED of these suffice."""
        num_drafted = num_tokens - num_requests
        row, nearest = self._bins[self._bin(num_requests)], self._bin(num_drafted)
        ratio = self._ratio(seconds, num_tokens)
        if nearest not in row:
            row[nearest] = _Bin(num_drafted)
        each = row[nearest]
        each.num_drafted = num_drafted
        self._num_steps += number - 1
        for _ in range(min(number, NUM_NEEDED)):
            each.recent.add(ratio, self._num_steps + 1)
            each.newest.append(ratio / self.load)
            if not num_drafted:
                each.plain.append(ratio)
        each.num_new += number
        each.measured_at = self._num_steps + 1
        self._count_step()

    def add_empty(self, num_requests: int, seconds: float) -> None:
        """Count a step for which a proposer was asked, and had no draft token: the forward pass is slower than that of
        a plain step, since other code has run before it. So it shows what a plain step takes at most."""
        self._empty.add(seconds - self.at(num_requests), self._num_steps + 1)
        if (each := self._plain_bin(num_requests)) is not None:
            each.empty.add(self._ratio(seconds, num_requests) / self.load, self._num_steps + 1)
        self._count_step()

    def refresh(self) -> None:
        """Update the table already now: a decision depends on it, and the load of the machine may just have changed."""
        if self._num_steps >= self._corrected_at + NUM_REFRESHED:
            self._correct()

    @property
    def empty_s(self) -> float:
        """By how many seconds a step's forward pass is slower after a proposer was asked in vain. A first quartile, as
        of plain steps: a mean would count the noise of the machine, too."""
        return max(0.0, self._empty.quick(self._num_steps) or 0.0)

    def at(self, num_requests: int, num_tokens: int | None = None) -> float:
        """The seconds of a step with so many tokens; None: of a plain one. Several proposers' drafts may come to more
        than the table has."""
        seconds = self.seconds(num_requests)
        return float(seconds[min(num_requests if num_tokens is None else num_tokens, len(seconds) - 1)])

    def more_s(self, num_requests: int, num_tokens: int, more: int) -> float:
        """The seconds that `more` tokens add to a forward pass of num_tokens."""
        return self.at(num_requests, num_tokens + more) - self.at(num_requests, num_tokens)

    def num_cold(self, num_requests: int) -> int:
        """How many plain steps of so many requests take longer after a draft."""
        return min(max(ceil(COLD_S / self.at(num_requests)), LEAST_COLD), MOST_COLD)

    def is_out_of_date(self, num_requests: int) -> bool:
        """Whether many steps were measured since the last plain one of about so many requests."""
        each = self._plain_bin(num_requests)
        return (0 if each is None else each.measured_at) <= self._num_steps - NUM_UNMEASURED

    def is_doubtful(self, num_requests: int) -> bool:
        """Whether other steps have become so much slower, or faster, since the last plain one of about so many requests
        that it may not be true of these, too."""
        each = self._plain_bin(num_requests)
        change = 1.0 if each is None or each.load_at is None else self.load / each.load_at
        return not 1 / DOUBTFUL < change < DOUBTFUL

    def _bin(self, number: int) -> int:
        return self._bin_of[min(number, len(self._bin_of) - 1)]

    def _plain_bin(self, num_requests: int) -> _Bin | None:
        return self._bins[self._bin(num_requests)].get(0)

    def _num_tokens(self, num_requests: int, num_drafted: int) -> int:
        return min(num_requests + num_drafted, len(self._base) - 1)

    def _ratio(self, seconds: float, num_tokens: int) -> float:
        return seconds / float(self._base[min(num_tokens, len(self._base) - 1)])

    def _count_step(self) -> None:
        self._num_steps += 1
        if self._num_steps >= self._corrected_at + NUM_BETWEEN:
            self._correct()

    def _correct(self) -> None:
        last, self._corrected_at = self._corrected_at, self._num_steps
        fresh, rare = list[tuple[_Bin, float]](), list[tuple[_Bin, float]]()
        bins = [(int(self._sizes[n - 1]), each) for n, row in self._bins.items() for each in row.values()]
        for num_requests, each in bins:
            if each.measured_at > last:
                if (ratio := each.recent.quick(self._num_steps, NUM_NEEDED)) is not None:
                    fresh.append((each, ratio))
                elif (ratio := self._ratio_of_few(each, num_requests)) is not None:
                    rare.append((each, ratio))
        changes = {id(each): ratio / each.ratio for each, ratio in fresh if each.ratio is not None}
        # Where drafting starts or stops, all other sizes are measured than before.
        stayed = [each for each in self._last if id(each) in changes]
        if stayed:
            logs = [log(changes[id(each)]) for each in stayed]
            change = exp(fmean(logs, [each.num_new for each in stayed]))
            self._noise += NEWEST_WEIGHT * (log(change) ** 2 - self._noise)
        else:
            change = median(changes.values() or [1.0]) ** (self._noise / (self._noise + OF_SIZES))
        self.load *= change
        measured = {id(each): ratio * change for each, ratio in rare} | {id(each): ratio for each, ratio in fresh}
        for row in self._bins.values():
            plain, of_older, since = row.get(0), change, -1
            if plain is not None and plain.ratio is not None and id(plain) in measured:
                of_older, since = measured[id(plain)] / plain.ratio, plain.corrected_at
            for each in row.values():
                if id(each) in measured:
                    each.ratio, each.load_at, each.corrected_at = measured[id(each)], self.load, self._num_steps
                elif each.ratio is not None:
                    each.ratio *= of_older if each.corrected_at <= since else change
        for _, each in bins:
            each.num_new = 0
        self._last = [each for each, _ in fresh] or self._last
        self.num_corrections += 1
        self._tables.clear()

    def _ratio_of_few(self, each: _Bin, num_requests: int) -> float | None:
        """The ratio of a bin that had fewer steps lately than are needed; None: too little is known."""
        num_tokens, last = self._num_tokens(num_requests, each.num_drafted), each.newest[-1] * self.load
        if last * DOUBTFUL < self._ratio(self.at(num_requests, num_tokens), num_tokens):
            return last
        return min(each.newest) * self.load if len(each.newest) == NUM_NEEDED else None

    def _table(self, num_requests: int) -> np.ndarray:
        """What `seconds` returns."""
        known = self._ratios_of(self._bin(num_requests))
        if 0 not in known:
            known = {0: self._ratio_of_plain(num_requests)} | known
        newest = self._newest_of(self._bin(num_requests))
        some = {number: ratio for number, ratio in known.items() if not number or number in newest}
        seconds = self._through(num_requests, known)
        if some != known:
            seconds = np.minimum(seconds, self._through(num_requests, some))
        return _never_falling(seconds)

    def _through(self, num_requests: int, ratios: Mapping[int, float]) -> np.ndarray:
        """float64 [max_tokens + 1]   the seconds by the number of tokens, from ratios by that of draft tokens."""
        sizes, known = [self._num_tokens(num_requests, number) for number in ratios], list(ratios.values())
        of_each = np.interp(self._logs, np.log(sizes), known)
        seconds: np.ndarray = self._base * np.concatenate([of_each[:1], of_each])
        more_s = self._base[sizes[-1] :] - self._base[sizes[-1]]
        seconds[sizes[-1] :] = seconds[sizes[-1]] + more_s * self._ratio_of_more(known[-1])
        return seconds

    def _ratio_of_more(self, ratio: float) -> float:
        """The ratio to assume of the time that further draft tokens add: the lowest that steps of any number of
        requests show, with several numbers of draft tokens. What these say counts the more, the longer the steps. Where
        nothing is known it is the load, or the ratio of the step if that is lower. Tokens that seem too dear are never
        tried; those that seem too cheap are, and then measured."""
        guess, guessed_s = min(ratio, self.load), FIRST_GUESS * float(self._base[1])
        found = []
        for nearest in self._bins:
            drafted = [*self._newest_of(nearest).items()]
            if len(drafted) > 1:
                sizes = [self._num_tokens(int(self._sizes[nearest - 1]), drafted[i][0]) for i in (0, -1)]
                first_s, last_s = self._base[sizes].tolist()
                measured_s = last_s * drafted[-1][1] - first_s * drafted[0][1]
                found.append((guessed_s * guess + measured_s) / (guessed_s + last_s - first_s))
        return max(0.0, min(found, default=guess))

    def _ratios_of(self, nearest: int) -> dict[int, float]:
        """Of the bins that were measured with so many requests: {draft tokens: ratio}, sorted. Plain steps take no
        longer than steps for which a proposer was asked in vain."""
        row = [each for _, each in sorted(self._bins.get(nearest, {}).items())]
        ratios = {each.num_drafted: each.ratio for each in row if each.ratio is not None}
        if 0 in ratios:
            ratios[0] = min(ratios[0], quick(row[0].plain))
            if (most := row[0].empty.mean(self._num_steps)) is not None:
                ratios[0] = min(ratios[0], most * self.load)
        return ratios

    def _newest_of(self, nearest: int) -> dict[int, float]:
        """The same, but of bins with draft tokens: of those that were measured lately, if there are several."""
        drafted = {each.num_drafted: each for each in self._bins.get(nearest, {}).values() if each.num_drafted}
        ratios = {number: ratio for number, ratio in self._ratios_of(nearest).items() if number}
        since = self._num_steps - MOST_AGE
        newest = {number: ratio for number, ratio in ratios.items() if drafted[number].measured_at > since}
        return newest if len(newest) >= NUM_NEWEST else ratios

    def _ratio_of_plain(self, num_requests: int) -> float:
        """The ratio to assume of plain steps, from those of fewer and of more requests; the load, if none was
        measured."""
        of_each = {n: self._ratios_of(n).get(0) for n in sorted(self._bins)}
        plain = {n: ratio for n, ratio in of_each.items() if ratio is not None}
        if not plain:
            return self.load
        known = np.log(self._sizes[[n - 1 for n in plain]])
        return float(np.interp(np.log(num_requests), known, list(plain.values())))


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
