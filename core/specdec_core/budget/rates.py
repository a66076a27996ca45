"""Acceptance rates by bin, learned online: shared between requests, and shifted by the recent rate of all requests and
of each."""

from __future__ import annotations

import numpy as np

SHARED_WEIGHT = 8.0
"""A first guess counts as much as this many tried draft tokens."""
SHARED_DECAY = 1 - 1 / 65536
"""By which shared counts shrink with each draft token that is tried; those of shifts shrink faster, as below."""
SHIFT_WEIGHT = 8.0
"""A shift begins with this many draft tokens, half of them accepted, as half were expected to be."""
GROUP_DECAY = 1 - 1 / 128
OWN_DECAY = 1 - 1 / 24
NUM_GROUPS = 3
LEAST = 0.005
"""Rates stay this far from 0 and 1, so that a few draft tokens can still change them."""


class Rates:
    """Estimates how often draft tokens of a bin are accepted. Bins are kinds of draft tokens, such as those of similar
    draft probability. Counts are shared by all requests of a group: group 0 has temperature 0, group 2 others whose
    draft tokens may be drawn, and group 1 the rest. All estimates of a group are shifted (in log odds) by how its
    recent draft tokens did in comparison with the shared rates, since other texts may come than before; each request's
    by how its own did in comparison with those of its group.

    guesses: float64 [num_bins], the acceptance rates to assume while bins are empty.

    Attribute: estimates float64 [num_rows, num_bins], by the request's row, as of its last `update`.
    """

    def __init__(self, num_rows: int, guesses: np.ndarray) -> None:
        self._guesses, self._groups = guesses, np.zeros(num_rows, dtype=np.int64)
        self._tried, self._accepted = np.zeros((NUM_GROUPS, len(guesses))), np.zeros((NUM_GROUPS, len(guesses)))
        self._recent = np.zeros((3, NUM_GROUPS))  # of each group: draft tokens tried, accepted, and expected to be
        self._own = np.zeros((3, num_rows))  # the same of each request
        self._odds: np.ndarray | None = None  # of each group and bin; None: they have changed
        self._num_added = 0  # how often draft tokens were counted
        self._updated_at = np.zeros(num_rows, dtype=np.int64)  # of each row: that number at its last update
        self.estimates = np.tile(guesses, (num_rows, 1))

    def start(self, row: int, group: int) -> None:
        """Forget the request that had this row before. What all requests share stays. The row has no estimates until
        its next `update`."""
        self._groups[row], self._own[:, row], self._updated_at[row] = group, 0, -1

    def group(self, row: int) -> int:
        return int(self._groups[row])

    def add(self, rows: np.ndarray, bins: np.ndarray, is_accepted: np.ndarray) -> None:
        """Count draft tokens whose parents were accepted. Each argument has an entry per token.

        rows: int64 [n], of its request. bins: int64 [n]. is_accepted: bool [n], whether it was accepted, too.
        """
        self._num_added += 1
        groups = self._groups[rows]
        expected, odds = self._shared()[groups, bins], self._odds_of_groups()[groups, bins]
        _count(self._recent, GROUP_DECAY, groups, is_accepted, expected)
        _count(self._own, OWN_DECAY, rows, is_accepted, odds / (1 + odds))
        shrunk = SHARED_DECAY ** len(rows)
        self._tried *= shrunk
        self._accepted *= shrunk
        np.add.at(self._tried, (groups, bins), 1)
        np.add.at(self._accepted, (groups, bins), is_accepted)
        self._odds = None

    def update(self, rows: np.ndarray) -> None:
        """Update the estimates of these rows by what was added since."""
        if (self._updated_at[rows] == self._num_added).all():
            return
        odds = self._odds_of_groups()[self._groups[rows]] * _shift(self._own[:, rows])[:, None]
        self.estimates[rows] = odds / (1 + odds)
        self._updated_at[rows] = self._num_added

    def _odds_of_groups(self) -> np.ndarray:
        """float64 [NUM_GROUPS, num_bins]   the odds of acceptance of each group's next draft tokens."""
        if self._odds is None:
            shared = self._shared()
            self._odds = shared / (1 - shared) * _shift(self._recent)[:, None]
        return self._odds

    def _shared(self) -> np.ndarray:
        """float64 [NUM_GROUPS, num_bins]   the acceptance rates of each group."""
        rates = (self._accepted + SHARED_WEIGHT * self._guesses) / (self._tried + SHARED_WEIGHT)
        bounded: np.ndarray = np.minimum(np.maximum(rates, LEAST), 1 - LEAST)
        return bounded


def _count(counts: np.ndarray, decay: float, rows: np.ndarray, is_accepted: np.ndarray, expected: np.ndarray) -> None:
    """Add draft tokens to `counts`, float64 [3, number of rows], after those of the same row have shrunk."""
    number = counts.shape[1]
    tried = np.bincount(rows, minlength=number)
    counts *= decay**tried
    counts += [tried, np.bincount(rows, is_accepted, number), np.bincount(rows, expected, number)]


def _shift(counts: np.ndarray) -> np.ndarray:
    """float64 [n]   by how much the odds of acceptance are higher than expected. counts: float64 [3, n]."""
    tried, accepted, expected = counts + SHIFT_WEIGHT * np.array([[1.0], [0.5], [0.5]])
    shift: np.ndarray = accepted * (tried - expected) / (expected * (tried - accepted))
    return shift
