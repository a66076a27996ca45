"""Acceptance rates by bin, learned online: shared between requests, and shifted by each request's own recent rate."""

from __future__ import annotations

import numpy as np

SHARED_WEIGHT = 8.0
"""A first guess counts as much as this many tried draft tokens."""
SHARED_DECAY = 1 - 1 / 65536
"""By which shared counts shrink with each draft token that is tried, and a request's own below."""
OWN_WEIGHT = 8.0
"""A request's own shift begins with this many draft tokens, half of them accepted, as half were expected to be."""
OWN_DECAY = 1 - 1 / 24
NUM_GROUPS = 3
LEAST = 0.005
"""Rates stay this far from 0 and 1, so that a few draft tokens can still change them."""


class Rates:
    """Estimates how often draft tokens of a bin are accepted. Bins are kinds of draft tokens, such as those of similar
    draft probability. Counts are shared by all requests of a group: group 0 has temperature 0, group 2 others whose
    draft tokens may be drawn, and group 1 the rest. Each request's estimates are shifted (in log odds) by how its
    recent draft tokens did in comparison with the shared rates.

    guesses: float64 [num_bins], the acceptance rates to assume while bins are empty.

    Attribute: estimates float64 [num_rows, num_bins], by the request's row, as of its last `update`.
    """

    def __init__(self, num_rows: int, guesses: np.ndarray) -> None:
        self._guesses, self._groups = guesses, np.zeros(num_rows, dtype=np.int64)
        self._tried, self._accepted = np.zeros((NUM_GROUPS, len(guesses))), np.zeros((NUM_GROUPS, len(guesses)))
        self._own = np.zeros((3, num_rows))  # of each request: draft tokens tried, accepted, and expected to be
        self._num_added = 0  # how often draft tokens were counted
        self._updated_at = np.zeros(num_rows, dtype=np.int64)  # of each row: that number at its last update
        self.estimates = np.tile(guesses, (num_rows, 1))

    def start(self, row: int, group: int) -> None:
        """Forget the request that had this row before. What all requests share stays."""
        self._groups[row], self._own[:, row], self._updated_at[row] = group, 0, -1
        self.update(np.array([row]))

    def add(self, rows: np.ndarray, bins: np.ndarray, is_accepted: np.ndarray) -> None:
        """Count draft tokens whose parents were accepted. Each argument has an entry per token.

        rows: int64 [n], of its request. bins: int64 [n]. is_accepted: bool [n], whether it was accepted, too.
        """
        self._num_added += 1
        groups, num_rows = self._groups[rows], len(self._groups)
        expected = self._shared()[groups, bins]
        shrunk = SHARED_DECAY ** len(rows)
        self._tried *= shrunk
        self._accepted *= shrunk
        np.add.at(self._tried, (groups, bins), 1)
        np.add.at(self._accepted, (groups, bins), is_accepted)
        counts = np.bincount(rows, minlength=num_rows)
        self._own *= OWN_DECAY**counts
        self._own[0] += counts
        self._own[1] += np.bincount(rows, is_accepted, minlength=num_rows)
        self._own[2] += np.bincount(rows, expected, minlength=num_rows)

    def update(self, rows: np.ndarray) -> None:
        """Update the estimates of these rows by what was added since."""
        if (self._updated_at[rows] == self._num_added).all():
            return
        tried, accepted, expected = self._own[:, rows] + OWN_WEIGHT * np.array([[1.0], [0.5], [0.5]])
        shift = accepted * (tried - expected) / (expected * (tried - accepted))
        shared = self._shared()
        odds = (shared / (1 - shared))[self._groups[rows]] * shift[:, None]
        self.estimates[rows] = odds / (1 + odds)
        self._updated_at[rows] = self._num_added

    def _shared(self) -> np.ndarray:
        """float64 [NUM_GROUPS, num_bins]   the acceptance rates of each group."""
        rates = (self._accepted + SHARED_WEIGHT * self._guesses) / (self._tried + SHARED_WEIGHT)
        bounded: np.ndarray = np.minimum(np.maximum(rates, LEAST), 1 - LEAST)
        return bounded
