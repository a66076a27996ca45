"""Limits what something costs that is done now and then, to a share of the time."""

from __future__ import annotations

from math import ceil


class Debt:
    """Time that was lost by doing something, and is paid back by a share of the steps' time before it is done again.

    Attribute: share.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._owed_s = 0.0

    @property
    def is_paid(self) -> bool:
        return self._owed_s <= 0

    @property
    def has_savings(self) -> bool:
        return self._owed_s < 0

    def add(self, seconds: float) -> None:
        self._owed_s += seconds

    def save(self, seconds: float, most_s: float) -> None:
        """Count time that doing it has saved: so much of it may be lost later. most_s: that is saved up in all."""
        self._owed_s = max(self._owed_s - seconds, min(self._owed_s, -most_s))

    def num_steps(self, step_s: float) -> int:
        """How many steps of so many seconds it takes until it is paid."""
        return ceil(max(0.0, self._owed_s) / (self.share * step_s))

    def reduce(self, times: float) -> None:
        """Divide what is owed."""
        self._owed_s = min(self._owed_s, self._owed_s / times)

    def forgive(self) -> None:
        """Allow it to be done again now."""
        self._owed_s = min(self._owed_s, 0.0)

    def pay(self, step_s: float) -> None:
        """Count the time of a step. Its share is not saved up: a long time without is not made up for."""
        self._owed_s = max(min(self._owed_s, 0.0), self._owed_s - self.share * step_s)
