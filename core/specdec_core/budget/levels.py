"""Decides, while a draft grows, which requests get another level of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from specdec_core.budget.choice import Expected, best_levels
from specdec_core.budget.survival import Group, Survival

MOST_AHEAD = 8
"""How many further levels are considered before each level."""


class Levels:
    """The `LevelBudget` of one call of `propose`.

    A level is decided on before it is drawn, from the levels above it: so sampled drafts stay lossless
    (docs/losslessness.md). Levels further down count, too: one that does not pay by itself is grown if it pays together
    with those below it.

    limits: the most draft tokens of each request.
    seconds: of the target's forward pass, by its number of tokens.
    level_s: the seconds of drafting a further level.
    so_far: what the step is expected to yield without these drafts; draft_s includes drafting the first level.
    """

    def __init__(
        self,
        group: Group,
        limits: Sequence[int],
        survival: Survival,
        seconds: np.ndarray,
        so_far: Expected,
        level_s: float,
    ) -> None:
        self._group, self._survival, self._seconds, self._level_s = group, survival, seconds, level_s
        self._so_far = so_far
        self._room = np.array(limits)
        self._reach = np.ones(len(limits))  # of the frontier's nodes: the probability to be accepted
        self._num_grown, self._started = 0, perf_counter()
        self.first_s: float | None = None  # measured until the first level was grown
        self.num_forwarded = 0  # levels that went on

    def goes_on(
        self, requests: np.ndarray, rows: np.ndarray, probs: np.ndarray, is_first: np.ndarray, num_nodes: np.ndarray
    ) -> np.ndarray:
        if self.first_s is None:
            self.first_s = perf_counter() - self._started
        self._num_grown += 1
        own = self._survival.of_nodes(self._group, requests, self._num_grown, probs, is_first)
        reach = self._reach[rows] * own
        size = len(self._room)
        expected = np.minimum(np.bincount(requests, reach, minlength=size), 1)
        self._room = self._room - np.bincount(requests, minlength=size)
        self._so_far = Expected(
            self._so_far.num_tokens + float(expected.sum()),
            self._so_far.num_rows + len(requests),
            self._so_far.draft_s + (self._level_s if self._num_grown > 1 else 0.0),
        )
        goes: np.ndarray = np.minimum(num_nodes, self._room) > 0
        if goes.any():
            sizes = np.maximum(num_nodes, 1)
            ahead = min(MOST_AHEAD, int((self._room[goes] / sizes[goes]).max()) or 1)
            gains = self._survival.of_levels(self._group, self._num_grown, ahead).cumprod(axis=1) * expected[:, None]
            gains *= goes[:, None] & (sizes[:, None] * np.arange(ahead) < self._room[:, None])
            goes &= best_levels(gains, sizes, self._so_far, self._seconds, 0.0, self._level_s) > 0
            self.num_forwarded += bool(goes.any())
        self._reach = reach[goes[requests]]
        return goes
