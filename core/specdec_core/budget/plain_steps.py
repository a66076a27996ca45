"""Steps in which nothing is drafted, to measure what plain decoding takes: else nothing would show that it has become
faster than it seems."""

from __future__ import annotations

from specdec_core.budget.cost_curve import NUM_NEEDED, CostCurve
from specdec_core.budget.debt import Debt

TIME_SHARE = 0.02
"""Of the time that plain steps may cost, where it is a close question whether drafting pays."""
COLD_SHARE = 0.2
"""By what share they take longer than other plain steps, on average."""
CLOSE, MOST_RARER = 0.1, 3.0
"""Where drafting saves more than the share CLOSE of the time, it hardly turns out to be slower, and plain steps are
measured the rarer, the more it saves: up to MOST_RARER times."""


class PlainSteps:
    """Decides for an engine in which steps none of its proposers drafts."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve, self._debt, self._num_left = curve, Debt(TIME_SHARE), 0

    def takes(self, num_requests: int, saved_share: float) -> bool:
        """Whether nothing is drafted in a step of so many requests, which has no prefill.

        saved_share: of the time per output token, what drafting is expected to save; 0: nothing is drafted.
        """
        is_wanted = self._debt.is_paid and self._curve.is_out_of_date(num_requests)
        if saved_share and not self._num_left and (is_wanted or self._curve.is_doubtful(num_requests)):
            self._num_left = self._curve.num_cold(num_requests) + NUM_NEEDED  # the last ones are measured
            lost_s = self._num_left * self._curve.at(num_requests) * (saved_share + COLD_SHARE)
            self._debt.add(lost_s * min(max(1.0, saved_share / CLOSE), MOST_RARER))
        is_taken = saved_share > 0 and self._num_left > 0
        self._num_left -= is_taken
        return is_taken

    def break_off(self) -> None:
        """Note that a step had prefill: after it, caches are as cold as after a draft."""
        self._num_left = 0

    def end_steps(self, seconds: float) -> None:
        self._debt.pay(seconds)
