"""Decides, while a draft grows, which requests get another level of draft tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from specdec_core.budget.choice import Expected, best_levels
from specdec_core.budget.survival import Survival

MOST_LOOKAHEAD = 8
"""How many further levels are considered before each level."""


class Levels:
    """The `LevelBudget` of one call of `propose`.

    A level is decided on before it is drawn, from the levels above it: so sampled drafts stay lossless
    (docs/losslessness.md). Levels further down count, too: one that does not pay by itself is grown if it pays together
    with those below it.

    rows: of the requests, in the statistics. limits: the most draft tokens of each request.
    worth: float64 [n], the share of each request's accepted draft tokens that other proposers' drafts do not have.
    costs: returns the seconds of the target's forward pass, by its number of tokens; what the step is expected to yield
        without these drafts, of which only these requests may get more, with draft_s of drafting the first level; and
        the seconds of drafting a further level. Called when the proposer asks about the first level: some never do.
    """

    def __init__(
        self,
        rows: np.ndarray,
        limits: Sequence[int],
        survival: Survival,
        worth: np.ndarray,
        costs: Callable[[], tuple[np.ndarray, Expected, float]],
    ) -> None:
        self._rows, self._survival, self._worth = rows, survival, worth
        self._limits_of, self._costs = limits, costs
        self._num_grown, self._started = 0, perf_counter()
        self.first_s: float | None = None  # measured until the first level was grown
        self.num_forwarded = 0  # levels that went on

    def _start(self) -> None:
        size = len(self._limits_of)
        self._seconds, self._so_far, self._level_s = self._costs()
        self._limits = self._room = np.array(self._limits_of)
        self._num_asked = np.ones(size, dtype=np.int64)  # draft tokens of the level that grows
        self._num_verified = np.zeros(size, dtype=np.int64)  # at most: a tree may grow more than it keeps
        self._reach = np.ones(size)  # of the tokens that went on: the probability to be accepted

    def goes_on(
        self, requests: np.ndarray, rows: np.ndarray, probs: np.ndarray, is_first: np.ndarray, num_nodes: np.ndarray
    ) -> np.ndarray:
        if self.first_s is None:
            self.first_s = perf_counter() - self._started
            self._start()
        self._num_grown += 1
        reach = self._reach[rows] * self._survival.of_nodes(self._rows[requests], probs, is_first)
        size = len(self._room)
        expected = np.minimum(np.bincount(requests, reach, minlength=size), 1) * self._worth
        num_verified = np.minimum(self._num_verified + np.bincount(requests, minlength=size), self._limits)
        so_far, level_s = self._so_far, self._level_s if self._num_grown > 1 else 0.0
        self._so_far = Expected(
            so_far.tokens + expected,
            so_far.num_rows + int((num_verified - self._num_verified).sum()),
            so_far.draft_s + level_s,
            others=so_far.others,
        )
        self._room, self._num_verified, self._num_asked = self._room - self._num_asked, num_verified, num_nodes
        goes: np.ndarray = np.minimum(num_nodes, self._room) > 0
        if goes.any():
            goes &= self._pays(expected, np.maximum(num_nodes, 1), goes)
            self.num_forwarded += bool(goes.any())
        self._reach = reach[goes[requests]]
        return goes

    def _pays(self, expected: np.ndarray, sizes: np.ndarray, may_go: np.ndarray) -> np.ndarray:
        """bool [batch]   the requests for which another level pays. expected: float64 [batch], accepted tokens of the
        level just grown. sizes: int64 [batch], the draft tokens of the next. may_go: bool [batch]."""
        if self._next_pays(expected, sizes, may_go):
            return may_go
        ahead = min(MOST_LOOKAHEAD, int((self._room[may_go] / sizes[may_go]).max()) or 1)
        gains = self._survival.of_levels(self._rows, self._num_grown, ahead).cumprod(axis=1) * expected[:, None]
        gains *= may_go[:, None] & (sizes[:, None] * np.arange(ahead) < self._room[:, None])
        levels, _ = best_levels(gains, sizes, self._so_far, self._seconds, 0.0, self._level_s)
        return levels > 0

    def _next_pays(self, expected: np.ndarray, sizes: np.ndarray, may_go: np.ndarray) -> bool:
        """Whether the next level pays by itself, and each request's part of it. Quicker than to look further."""
        so_far, seconds, most = self._so_far, self._seconds, len(self._seconds) - 1
        gains = expected * self._survival.of_levels(self._rows, self._num_grown, 1)[:, 0]
        saved = 1 / so_far.tokens - 1 / (so_far.tokens + gains)
        if not may_go.all():
            saved, sizes = saved[may_go], sizes[may_go]
        now_s = float(seconds[min(so_far.num_rows, most)])
        rows_s = float(seconds[min(so_far.num_rows + int(sizes.sum()), most)]) - now_s
        now, step_s = so_far.steps_per_token, now_s + so_far.draft_s
        if (now - float(saved.sum())) * (step_s + rows_s + self._level_s) >= now * step_s:
            return False
        return bool((saved * sizes.sum() * step_s > now * rows_s * sizes).all())
