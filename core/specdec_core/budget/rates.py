"""Acceptance rates by bin, learned online: shared between requests, and shifted by each request's own recent rate."""

from __future__ import annotations

import numpy as np

SHARED_WEIGHT = 8.0
"""A first guess counts as much as this many tried draft tokens."""
SHARED_DECAY = 1 - 1 / 4096
OWN_WEIGHT = 2.0
OWN_DECAY = 1 - 1 / 24
LEAST = 0.005
"""Rates stay this far from 0 and 1, so that a few draft tokens can still change them."""


class Rates:
    """Estimates how often draft tokens of a bin are accepted. Bins are kinds of draft tokens, such as those of similar
    draft probability. Counts of a bin are shared by all requests of a group; groups are requests that have temperature
    0, and others. Each request's estimates are shifted (in log odds) by how its recent draft tokens did in comparison
    with the shared rates.

    The arguments of its methods are arrays with one entry per draft token: `rows` int64, the row of its request in
    these statistics; `groups` int64, 1 if the request samples its tokens, 0 if not; `bins` int64; `guesses` float, the
    acceptance rate to assume while the bin is empty.
    """

    def __init__(self, num_rows: int, num_bins: int) -> None:
        self._tried, self._accepted = np.zeros((2, num_bins)), np.zeros((2, num_bins))
        self._own = np.zeros((3, num_rows))  # of each request: draft tokens tried, accepted, and expected to be
        self._shift = np.zeros(num_rows)

    def clear(self, row: int) -> None:
        """Forget a request's own counts. What all requests share stays."""
        self._own[:, row] = self._shift[row] = 0

    def of(self, rows: np.ndarray, groups: np.ndarray, bins: np.ndarray, guesses: np.ndarray | float) -> np.ndarray:
        """float64 [n]   the estimated probability that each draft token is accepted if its parent is."""
        shared = self._shared(groups, bins, guesses)
        odds = shared / (1 - shared) * np.exp(self._shift[rows])
        estimated: np.ndarray = odds / (1 + odds)
        return estimated

    def add(
        self,
        rows: np.ndarray,
        groups: np.ndarray,
        bins: np.ndarray,
        guesses: np.ndarray | float,
        is_accepted: np.ndarray,
    ) -> None:
        """Count draft tokens whose parents were accepted. is_accepted: bool [n], whether they were, too."""
        expected = self._shared(groups, bins, guesses)
        self._tried *= SHARED_DECAY
        self._accepted *= SHARED_DECAY
        np.add.at(self._tried, (groups, bins), 1)
        np.add.at(self._accepted, (groups, bins), is_accepted)
        num_rows = len(self._shift)
        counts = np.bincount(rows, minlength=num_rows)
        self._own *= OWN_DECAY**counts
        self._own[0] += counts
        self._own[1] += np.bincount(rows, is_accepted, minlength=num_rows)
        self._own[2] += np.bincount(rows, expected, minlength=num_rows)
        tried, accepted, hoped = self._own[:, rows] + OWN_WEIGHT * np.array([[1.0], [0.5], [0.5]])
        self._shift[rows] = np.log(accepted * (tried - hoped) / (hoped * (tried - accepted)))

    def _shared(self, groups: np.ndarray, bins: np.ndarray, guesses: np.ndarray | float) -> np.ndarray:
        tried, accepted = self._tried[groups, bins], self._accepted[groups, bins]
        rates = (accepted + SHARED_WEIGHT * guesses) / (tried + SHARED_WEIGHT)
        bounded: np.ndarray = np.minimum(np.maximum(rates, LEAST), 1 - LEAST)
        return bounded
