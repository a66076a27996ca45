"""What it costs to start drafting after steps without, and for how long drafting then goes on."""

from __future__ import annotations

import sys

from specdec_core.budget.recent import Recent

FIRST_LENGTH = 16.0
"""Steps that drafting is assumed to go on for, at first."""
NEWEST_WEIGHT = 0.5
"""Of the newest run, in their average length."""


class Starts:
    """A run is a number of steps in a row in which a proposer drafts. Its first draft takes longer: tokens that the
    proposer has not observed yet are shown to it, and the caches hold other data. A run has to pay for that.

    Attribute: is_next, whether the next draft starts a run.
    """

    def __init__(self) -> None:
        self._more = Recent(sys.maxsize)
        self._mean_length, self._length = FIRST_LENGTH, 0

    @property
    def is_next(self) -> bool:
        return not self._length

    def go_on(self) -> None:
        """Note that the proposer has drafted in a step."""
        self._length += 1

    def end(self) -> None:
        """Note that it has not."""
        if self._length:
            self._mean_length += NEWEST_WEIGHT * (self._length - self._mean_length)
            self._length = 0

    def add(self, num_requests: int, seconds: float, step: int) -> None:
        """Count the first draft of a run, which took so many seconds longer than others."""
        self._more.add(seconds / num_requests, step)

    def seconds(self, num_requests: int, step: int) -> float:
        """What the start of a run would add to each of its drafts; 0 within a run."""
        more_s = self._more.mean(step, needed=1) if self.is_next else None
        return 0.0 if more_s is None else more_s * num_requests / self._mean_length
