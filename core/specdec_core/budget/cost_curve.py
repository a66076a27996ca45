"""The time of the target's forward pass as a function of its number of tokens, kept current while the engine runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specdec_core.budget.recent import Recent

MOST_AGE = 128
"""Of measurements, in measured steps."""
NUM_BETWEEN = 32
"""Measured steps between two updates of the table."""


class CostCurve:
    """Estimates the seconds that a step takes in the target's forward pass and in verification, from the number of
    tokens in the forward pass. Drafting is not included.

    The shape of the curve is measured when the engine is built. Steps that the engine runs correct it: for each size
    that was measured, by the median ratio of the steps' times to the curve. A size without such steps takes the ratio
    of its neighbors. So the estimates follow longer contexts, sampling parameters and the load of the machine.

    measured: seconds by number of tokens, for one or more numbers.
    max_tokens: the most tokens of a forward pass.

    Attribute: seconds float64 [max_tokens + 1], by number of tokens; it never falls.
    """

    def __init__(self, measured: Mapping[int, float], max_tokens: int) -> None:
        self._sizes = np.array(sorted(measured))
        self._logs = np.log(np.arange(1, max_tokens + 1))
        self._measured = np.array([measured[size] for size in self._sizes.tolist()])
        self._ratios = [Recent(MOST_AGE) for _ in measured]
        self._num_steps = 0
        self._base = self._interpolated(max_tokens)
        bins = np.abs(np.subtract.outer(self._logs, np.log(self._sizes))).argmin(axis=1)
        self._expected = list(zip(bins.tolist(), self._base[1:].tolist(), strict=True))  # of each number of tokens
        self.seconds = np.maximum.accumulate(self._base)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Correct the curve by one step."""
        self._num_steps += 1
        nearest, expected_s = self._expected[num_tokens - 1]
        self._ratios[nearest].add(seconds / expected_s, self._num_steps)
        if self._num_steps % NUM_BETWEEN == 0:
            self._correct()

    def more_s(self, num_tokens: int, more: int) -> float:
        """The seconds that `more` tokens add to a forward pass of num_tokens."""
        most = len(self.seconds) - 1
        return float(self.seconds[min(num_tokens + more, most)] - self.seconds[min(num_tokens, most)])

    def _correct(self) -> None:
        medians = [ratios.median(self._num_steps) for ratios in self._ratios]
        known = {size: each for size, each in zip(self._sizes.tolist(), medians, strict=True) if each is not None}
        if known:
            of_each = np.interp(self._logs, np.log(list(known)), list(known.values()))
            self.seconds = np.maximum.accumulate(self._base * np.concatenate([of_each[:1], of_each]))

    def _interpolated(self, max_tokens: int) -> np.ndarray:
        """The measured curve at 0 to max_tokens tokens. Beyond the largest measured size it goes on as a line."""
        numbers, sizes, measured = np.arange(max_tokens + 1), self._sizes, self._measured
        curve: np.ndarray = np.interp(numbers, sizes, measured)
        if max_tokens > sizes[-1]:
            last = (measured[-1] - measured[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else measured[-1]
            curve = np.where(numbers > sizes[-1], measured[-1] + max(0.0, last) * (numbers - sizes[-1]), curve)
        return curve
