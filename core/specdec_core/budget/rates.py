"""Acceptance rates by bin, learned online: shared between requests, and shifted by the recent rate of all requests and
of each."""

from __future__ import annotations

from math import log

import numpy as np

from specdec_core.budget.shift import Shift, logistic

SHARED_WEIGHT = 8.0
"""A first guess counts as much as this many tried draft tokens."""
LOG_DECAY = log(1 - 1 / 65536)
"""The logarithm of the factor by which shared counts shrink with each draft token that is tried; those of shifts shrink
faster, as below."""
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

    guesses: of each table of bins, float64 [its bins], the acceptance rates to assume while bins are empty. Tables
        share nothing; their bins are numbered in one row, and counted and updated in one go, which is quicker.

    Attribute: estimates float64 [num_rows, all bins], by the request's row, as of its last `update`.
    """

    def __init__(self, num_rows: int, *guesses: np.ndarray) -> None:
        self._num_tables, self._guesses = len(guesses), np.concatenate(guesses)
        self._table_of = np.repeat(np.arange(len(guesses)), [len(each) for each in guesses])  # of each bin
        self._groups = np.zeros(num_rows, dtype=np.int64)
        self._tried, self._accepted = np.zeros((2, NUM_GROUPS, len(self._guesses)))
        # Shifts have a row for each group or request and each table.
        num_groups = NUM_GROUPS * len(guesses)
        self._all_groups, self._tables = np.arange(num_groups), np.arange(len(guesses))
        self._recent = Shift(num_groups, num_groups, GROUP_DECAY)
        self._own = Shift(num_rows * len(guesses), num_groups, OWN_DECAY)
        self._log_odds: np.ndarray | None = None  # of each group and bin; None: they have changed
        self._shared = np.empty(0)  # float64 [NUM_GROUPS, all bins], the acceptance rates of each group, as of then
        self._num_added = 0  # how often draft tokens were counted
        self._updated_at = np.zeros(num_rows, dtype=np.int64)  # of each row: that number at its last update
        self.estimates = np.tile(self._guesses, (num_rows, 1))

    def start(self, row: int, group: int) -> None:
        """Forget the request that had this row before. What all requests share stays. The row has no estimates until
        its next `update`."""
        self._groups[row], self._updated_at[row] = group, -1
        self._own.forget(row * self._num_tables, self._num_tables)

    def group(self, row: int) -> int:
        return int(self._groups[row])

    def add(self, rows: np.ndarray, bins: np.ndarray, is_accepted: np.ndarray) -> None:
        """Count draft tokens whose parents were accepted. Each argument has an entry per token.

        rows: int64 [n], of its request. bins: int64 [n]. is_accepted: bool [n], whether it was accepted, too.
        """
        if not len(rows):
            return
        self._num_added += 1
        groups, tables = self._groups[rows], self._table_of[bins]
        of_group, shared = self._log_odds_of_groups()[groups, bins], self._shared[groups, bins]
        kept = np.exp(LOG_DECAY * np.bincount(tables, minlength=self._num_tables))[self._table_of]
        self._tried *= kept
        self._accepted *= kept
        places, size = groups * len(self._guesses) + bins, self._tried.size
        self._tried += np.bincount(places, minlength=size).reshape(NUM_GROUPS, -1)
        self._accepted += np.bincount(places, is_accepted, size).reshape(NUM_GROUPS, -1)
        groups, rows = groups * self._num_tables + tables, rows * self._num_tables + tables
        seen, seen_in_group = self._own.seen(rows), self._recent.seen(self._all_groups)[groups]
        errors = is_accepted - logistic(of_group + self._own.log_odds(groups, seen))
        self._recent.add(groups, groups, seen_in_group, is_accepted, shared, errors)
        self._own.add(rows, groups, seen, is_accepted, logistic(of_group), errors)
        self._log_odds = None

    def update(self, rows: np.ndarray) -> None:
        """Update the estimates of these rows by what was added since."""
        if (self._updated_at[rows] == self._num_added).all():
            return
        groups = self._groups[rows]
        own_rows, own_groups = ((each[:, None] * self._num_tables + self._tables).ravel() for each in (rows, groups))
        own = self._own.log_odds(own_groups, self._own.seen(own_rows)).reshape(len(rows), -1)
        self.estimates[rows] = logistic(self._log_odds_of_groups()[groups] + own[:, self._table_of])
        self._updated_at[rows] = self._num_added

    def _log_odds_of_groups(self) -> np.ndarray:
        """float64 [NUM_GROUPS, all bins]   the log odds of acceptance of each group's next draft tokens."""
        if self._log_odds is None:
            rates = (self._accepted + SHARED_WEIGHT * self._guesses) / (self._tried + SHARED_WEIGHT)
            shared = self._shared = np.minimum(np.maximum(rates, LEAST), 1 - LEAST)
            recent = self._recent.log_odds(self._all_groups, self._recent.seen(self._all_groups))
            recent = recent.reshape(NUM_GROUPS, -1)
            self._log_odds = np.log(shared / (1 - shared)) + recent[:, self._table_of]
        return self._log_odds
