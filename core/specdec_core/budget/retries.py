"""When requests that do not draft are tried again: so often that it takes a fixed share of the time."""

from __future__ import annotations

SHARE = 0.01


class Retries:
    """Saves SHARE of the time of steps in which some request does not draft, and says when it pays for a retry. A retry
    is expected to cost what the last one did; the first is free."""

    def __init__(self) -> None:
        self._saved_s = self._cost_s = 0.0

    @property
    def is_due(self) -> bool:
        return self._saved_s >= self._cost_s

    def save(self, step_s: float) -> None:
        """Count a step. At most what two retries cost is saved, so that a long time without any is not made up for."""
        self._saved_s = min(self._saved_s, 2 * self._cost_s) + SHARE * step_s

    def pay(self, seconds: float) -> None:
        """Count a retry by which this much time was lost. One that lost none is followed by others at once, until the
        estimates have changed."""
        self._cost_s = seconds
        self._saved_s -= seconds
