"""Limits what something costs that is done now and then, to a share of the time."""

from __future__ import annotations


class Debt:
    """Time that was lost by doing something, and is paid back by a share of the steps' time before it is done again."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._owed_s = 0.0

    @property
    def is_paid(self) -> bool:
        return self._owed_s <= 0

    def add(self, seconds: float) -> None:
        self._owed_s += seconds

    def pay(self, step_s: float) -> None:
        """Count the time of a step. Nothing is saved up: a long time without is not made up for."""
        self._owed_s = max(0.0, self._owed_s - self._share * step_s)
