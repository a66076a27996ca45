"""By how much recent acceptance differs from what was expected, and how much of that to count on."""

from __future__ import annotations

from math import log

import numpy as np

WEIGHT = 8.0
"""A shift begins with this many draft tokens, half of them accepted, as half were expected to be."""
FIRST_COUNTS = WEIGHT * np.array([[1.0], [0.5], [0.5]])
SHARE_WEIGHT = 3.0
"""The information (in the sense of statistics) that the first guess of a share counts for."""
SHARE_DECAY = 1 - 1 / 2048
"""By which information shrinks with each draft token."""
MOST = 1.5
"""The largest share. Above 1, the next draft tokens differ by more than the last ones, which `WEIGHT` holds back."""


class Shift:
    """The shift of acceptance of each row (a request or a group of them): how much higher its log odds are, by its
    recent draft tokens, than was expected of these.

    There are few of these, so part of a shift is chance. Which share of it the next draft tokens show, too, is learned
    for each group by logistic regression, with a Newton step at each `add`. At temperature 0 it is nearly all; where
    draft tokens are drawn, little.

    decay: by which a row's counts shrink with each of its draft tokens.
    """

    def __init__(self, num_rows: int, num_groups: int, decay: float) -> None:
        self._counts = np.zeros((3, num_rows))  # draft tokens tried, accepted, and expected to be
        self._log_decay = log(decay)
        self._shares, self._information = np.ones(num_groups), np.zeros(num_groups)

    def forget(self, first: int, number: int) -> None:
        """Start anew a number of rows, from the first one on. The shares stay."""
        self._counts[:, first : first + number] = 0

    def log_odds(self, groups: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """float64 [n]   the shift of the next draft tokens of some rows. groups: int64 [n], theirs. seen: what `seen`
        returned for the rows."""
        expected: np.ndarray = self._shares[groups] * seen
        return expected

    def add(
        self,
        rows: np.ndarray,
        groups: np.ndarray,
        seen: np.ndarray,
        is_accepted: np.ndarray,
        expected: np.ndarray,
        errors: np.ndarray,
    ) -> None:
        """Count draft tokens; each argument has an entry for each.

        rows, groups: int64 [n]. seen: what `seen` returned for the rows. is_accepted: bool [n]. expected: float64 [n],
        the acceptance that was expected without this shift. errors: float64 [n], is_accepted less the acceptance that
        was expected with all shifts.
        """
        number = len(self._shares)
        probs = is_accepted - errors
        variance = probs * (1 - probs)
        self._information *= SHARE_DECAY ** np.bincount(groups, minlength=number)
        self._information += np.bincount(groups, seen**2 * variance, number)
        self._shares += np.bincount(groups, seen * errors, number) / (self._information + SHARE_WEIGHT)
        self._shares = np.minimum(np.maximum(self._shares, 0), MOST)  # np.clip takes three times as long
        first = int(rows.min())  # most rows have no draft tokens
        rows = rows - first
        tried = np.bincount(rows)
        counts = self._counts[:, first : first + len(tried)]
        counts *= np.exp(self._log_decay * tried)
        counts += [tried, np.bincount(rows, is_accepted), np.bincount(rows, expected)]

    def seen(self, rows: np.ndarray) -> np.ndarray:
        """float64 [n]   by how much the log odds of the recent draft tokens were higher than expected."""
        tried, accepted, expected = self._counts[:, rows] + FIRST_COUNTS
        seen: np.ndarray = np.log(accepted * (tried - expected) / (expected * (tried - accepted)))
        return seen


def logistic(log_odds: np.ndarray) -> np.ndarray:
    """The probability that has these log odds."""
    probability: np.ndarray = 1 / (1 + np.exp(-log_odds))
    return probability
