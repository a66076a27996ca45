"""Acceptance rates by bin, learned online: shared between requests, and shifted by the recent rate of all requests and
of each."""

from __future__ import annotations

import numpy as np

from specdec_core.budget.shift import Shift, logistic

SHARED_WEIGHT = 8.0
"""A first guess counts as much as this many tried draft tokens."""
SHARED_DECAY = 1 - 1 / 65536
"""By which shared counts shrink with each draft token that is tried; those of shifts shrink faster, as below."""
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
    by how its own did in comparison with those of its group (`Shift`).

    guesses: float64 [num_bins], the acceptance rates to assume while bins are empty.

    Attribute: estimates float64 [num_rows, num_bins], by the request's row, as of its last `update`.
    """

    def __init__(self, num_rows: int, guesses: np.ndarray) -> None:
        self._guesses, self._groups = guesses, np.zeros(num_rows, dtype=np.int64)
        self._tried, self._accepted = np.zeros((NUM_GROUPS, len(guesses))), np.zeros((NUM_GROUPS, len(guesses)))
        self._recent = Shift(NUM_GROUPS, NUM_GROUPS, GROUP_DECAY)
        self._own = Shift(num_rows, NUM_GROUPS, OWN_DECAY)
        self._log_odds: np.ndarray | None = None  # of each group and bin; None: they have changed
        self._num_added = 0  # how often draft tokens were counted
        self._updated_at = np.zeros(num_rows, dtype=np.int64)  # of each row: that number at its last update
        self.estimates = np.tile(guesses, (num_rows, 1))

    def start(self, row: int, group: int) -> None:
        """Forget the request that had this row before. What all requests share stays. The row has no estimates until
        its next `update`."""
        self._groups[row], self._updated_at[row] = group, -1
        self._own.forget(row)

    def group(self, row: int) -> int:
        return int(self._groups[row])

    def add(self, rows: np.ndarray, bins: np.ndarray, is_accepted: np.ndarray) -> None:
        """Count draft tokens whose parents were accepted. Each argument has an entry per token.

        rows: int64 [n], of its request. bins: int64 [n]. is_accepted: bool [n], whether it was accepted, too.
        """
        self._num_added += 1
        groups = self._groups[rows]
        shared, of_group = self._shared()[groups, bins], self._log_odds_of_groups()[groups, bins]
        errors = is_accepted - logistic(of_group + self._own.log_odds(rows, groups))
        self._recent.add(groups, groups, is_accepted, shared, errors)
        self._own.add(rows, groups, is_accepted, logistic(of_group), errors)
        shrunk = SHARED_DECAY ** len(rows)
        self._tried *= shrunk
        self._accepted *= shrunk
        np.add.at(self._tried, (groups, bins), 1)
        np.add.at(self._accepted, (groups, bins), is_accepted)
        self._log_odds = None

    def update(self, rows: np.ndarray) -> None:
        """Update the estimates of these rows by what was added since."""
        if (self._updated_at[rows] == self._num_added).all():
            return
        groups = self._groups[rows]
        own = self._own.log_odds(rows, groups)
        self.estimates[rows] = logistic(self._log_odds_of_groups()[groups] + own[:, None])
        self._updated_at[rows] = self._num_added

    def _log_odds_of_groups(self) -> np.ndarray:
        """float64 [NUM_GROUPS, num_bins]   the log odds of acceptance of each group's next draft tokens."""
        if self._log_odds is None:
            shared, groups = self._shared(), np.arange(NUM_GROUPS)
            self._log_odds = np.log(shared / (1 - shared)) + self._recent.log_odds(groups, groups)[:, None]
        return self._log_odds

    def _shared(self) -> np.ndarray:
        """float64 [NUM_GROUPS, num_bins]   the acceptance rates of each group."""
        rates = (self._accepted + SHARED_WEIGHT * self._guesses) / (self._tried + SHARED_WEIGHT)
        bounded: np.ndarray = np.minimum(np.maximum(rates, LEAST), 1 - LEAST)
        return bounded
