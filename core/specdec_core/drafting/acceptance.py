"""What became of each request's drafts, and what its next ones may be expected to be worth."""

from __future__ import annotations

import numpy as np

EDGES = np.array([0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
NUM_BINS = len(EDGES) + 1
MOST_LEVELS = 16  # deeper ones count as the last of these
AGEING = 1 - 1 / 128
BELIEF, DEPTH_BELIEF = 2, 4  # observations that an expectation without any is worth


class Acceptance:
    """Counts in rows, one for each request, of nodes whose parent was accepted: only these were put to the test.

    A chosen node is believed to be accepted with the probability that the draft gave it, the first draw from a
    distribution with certainty, as if the draft's distributions were the target's. How much of that came true in all,
    and for nodes of about that probability, corrects it. Requests share nothing: temperature and text decide what a
    draft's probability is worth. Where costs are given, a request's drafts so depend on its own past alone.

    Counts age with every step in which the request may have a draft. So one whose drafts were refused until nothing was
    expected of them comes to expect more, tries again, and learns whether that is still so.
    """

    def __init__(self, num_rows: int) -> None:
        nodes, levels = (num_rows, 2 * NUM_BINS), (num_rows, MOST_LEVELS)
        self._tried, self._accepted = np.zeros(nodes), np.zeros(nodes)  # the first draws in the second half
        self._believed = np.zeros(num_rows)  # sum over nodes that were tried
        self._levels_tried, self._levels_accepted = np.zeros(levels), np.zeros(levels)
        self._spent, self._gained = np.zeros(num_rows), np.zeros(num_rows)
        self._all: tuple[np.ndarray, ...] = tuple(vars(self).values())

    def clear(self, row: int) -> None:
        for counts in self._all:
            counts[row] = 0

    def age(self, rows: np.ndarray) -> None:
        """One step of these requests."""
        for counts in self._all:
            counts[rows] *= AGEING

    def add_nodes(
        self, rows: np.ndarray, depth: int, probs: np.ndarray, is_first_draw: np.ndarray, is_accepted: np.ndarray
    ) -> None:
        """Nodes of one depth, from 1 on, whose parents were accepted."""
        bins, believed = _judged(probs, is_first_draw)
        np.add.at(self._tried, (rows, bins), 1)
        np.add.at(self._accepted, (rows, bins), is_accepted)
        np.add.at(self._believed, rows, believed)
        level = min(depth, MOST_LEVELS) - 1
        self._levels_tried[np.unique(rows), level] += 1
        self._levels_accepted[rows[is_accepted], level] += 1

    def add_steps(self, rows: np.ndarray, spent: np.ndarray, gained: np.ndarray) -> None:
        """What steps cost, in passes of the target, and the tokens they gave."""
        self._spent[rows] += spent
        self._gained[rows] += gained

    def of_nodes(self, rows: np.ndarray, probs: np.ndarray, is_first_draw: np.ndarray) -> np.ndarray:
        """float64 [n]   expected probability of being accepted if the parent is."""
        bins, believed = _judged(probs, is_first_draw)
        came_true = (self._accepted[rows].sum(axis=-1) + 1) / (self._believed[rows] + 1)
        belief = np.minimum(believed * came_true, 1)
        expected: np.ndarray = (self._accepted[rows, bins] + BELIEF * belief) / (self._tried[rows, bins] + BELIEF)
        return expected

    def of_level(self, rows: np.ndarray, depth: int) -> np.ndarray:
        """float64 [n]   the same of a whole set of siblings at this depth, about which the draft was not asked yet."""
        tried, accepted = self._levels_tried[rows], self._levels_accepted[rows]
        anywhere = (accepted.sum(axis=-1) + 1) / (tried.sum(axis=-1) + 1)
        level = min(depth, MOST_LEVELS) - 1
        expected: np.ndarray = (accepted[:, level] + DEPTH_BELIEF * anywhere) / (tried[:, level] + DEPTH_BELIEF)
        return expected

    def cost_per_token(self, rows: np.ndarray) -> np.ndarray:
        """float64 [n]   in passes of the target: 1 without any draft."""
        cost: np.ndarray = (self._spent[rows] + 1) / (self._gained[rows] + 1)
        return cost


def _judged(probs: np.ndarray, is_first_draw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each node's bin, and with which probability it is believed to be accepted."""
    return np.searchsorted(EDGES, probs) + NUM_BINS * is_first_draw, np.where(is_first_draw, 1, probs)
