"""How likely a proposer's draft tokens are to be accepted, learned from its earlier drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from specdec_core.budget.nodes import Nodes
from specdec_core.budget.rates import Rates
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import RequestView
from specdec_core.drafting.rows import RequestRows

EDGES = np.array([0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
"""Of the bins of similar draft probability."""
NUM_SCORES = len(EDGES) + 1
MOST_LEVELS = 32
"""Deeper draft tokens count as ones of this depth."""
GUESS = 0.7
"""The acceptance rate to assume of draft tokens without scores, and of levels."""


@frozen(eq=False)
class Group:
    """Requests in the order of a batch, with their places in the statistics."""

    requests: Sequence[RequestView]
    rows: np.ndarray  # int64 [n]
    groups: np.ndarray  # int64 [n]   0: temperature 0; 1: sampled

    def part(self, indices: Sequence[int]) -> Group:
        return Group([self.requests[i] for i in indices], self.rows[indices], self.groups[indices])


class Survival:
    """Estimates for one proposer how likely draft tokens are to be accepted, given that their parents are.

    Single tokens go by the score that the proposer gave them, or by their depth if it gives none. Levels, of which no
    token is known yet, go by their depth. Both depend on the request's temperature and recent drafts (`Rates`).
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._rows = RequestRows(max_num_seqs)
        self._nodes = Rates(max_num_seqs, 2 * NUM_SCORES + MOST_LEVELS)
        self._levels = Rates(max_num_seqs, MOST_LEVELS)

    def start(self, request: RequestView) -> None:
        self._rows.start(request)

    def finish(self, request: RequestView) -> None:
        """Forget a request. May be called twice, and for a request that did not start."""
        if (row := self._rows.get(request)) is not None:
            self._nodes.clear(row)
            self._levels.clear(row)
            self._rows.finish(request)

    def group(self, requests: Sequence[RequestView], is_sampled: Sequence[bool]) -> Group:
        """is_sampled: whether each request has a temperature above 0."""
        return Group(requests, np.array(self._rows.of(requests)), np.array(is_sampled, dtype=np.int64))

    def of_levels(self, group: Group, above: int, number: int) -> np.ndarray:
        """float64 [n, number]   the probability that a token of each of the levels below depth `above` is accepted, if
        one was in the level before."""
        bins = np.minimum(np.arange(above, above + number), MOST_LEVELS - 1)
        return self._levels.of(group.rows[:, None], group.groups[:, None], bins, GUESS)

    def of_nodes(
        self,
        group: Group,
        requests: np.ndarray,
        depths: np.ndarray | int,
        scores: np.ndarray | None,
        is_first_draw: np.ndarray,
    ) -> np.ndarray:
        """float64 [n]   the probability that each draft token is accepted, if its parent is.

        requests: int64 [n], indices into the group. depths: int64 [n], or one depth of all.
        scores: float [n], the proposer's estimates; None: it gives none.
        is_first_draw: bool [n], whether a token is the first of sampled siblings.
        """
        bins, guesses = _bins(len(requests), depths, scores, is_first_draw)
        return self._nodes.of(group.rows[requests], group.groups[requests], bins, guesses)

    def learn(self, group: Group, draft: Draft, num_tokens: Sequence[int]) -> None:
        """Compare a draft with the tokens that its requests emitted afterwards. Requests that emitted nothing, and
        those that have ended, are left out.

        num_tokens: of each request when it was drafted for.
        """
        if not draft.num_nodes:
            return
        nodes = Nodes.of(draft)
        texts = np.full((len(group.requests), int(nodes.depths.max(initial=1))), -1)
        for i, (request, number) in enumerate(zip(group.requests, num_tokens, strict=True)):
            new = request.token_ids[number : number + texts.shape[1]]
            texts[i, : len(new)] = new
        is_known = (texts[:, 0] >= 0) & (self._rows_now(group) == group.rows)
        is_right = nodes.is_alive & (nodes.token_ids == texts[nodes.requests, nodes.depths - 1])
        is_accepted = nodes.down_the_tree(is_right)
        is_tried = nodes.is_alive & is_known[nodes.requests] & ((nodes.parents < 0) | is_accepted[nodes.parents])
        if not is_tried.any():
            return
        requests, accepted, depths = nodes.requests[is_tried], is_accepted[is_tried], nodes.depths[is_tried]
        scores = None if nodes.scores is None else nodes.scores[is_tried]
        bins, guesses = _bins(len(requests), depths, scores, nodes.is_first_draw[is_tried])
        self._nodes.add(group.rows[requests], group.groups[requests], bins, guesses, accepted)
        width = texts.shape[1]
        levels = requests * width + depths - 1
        if not draft.is_chain:
            is_level_accepted = np.zeros(len(texts) * width, dtype=bool)
            is_level_accepted[levels[accepted]] = True
            levels = np.unique(levels)
            accepted = is_level_accepted[levels]
        requests, bins = np.divmod(levels, width)
        bins = np.minimum(bins, MOST_LEVELS - 1)
        self._levels.add(group.rows[requests], group.groups[requests], bins, GUESS, accepted)

    def _rows_now(self, group: Group) -> np.ndarray:
        return np.array([-1 if (row := self._rows.get(each)) is None else row for each in group.requests])


def _bins(
    number: int, depths: np.ndarray | int, scores: np.ndarray | None, is_first_draw: np.ndarray
) -> tuple[np.ndarray, np.ndarray | float]:
    """The bins of draft tokens, int64 [number], and the acceptance rates to assume while a bin is empty."""
    if scores is None:
        bins = 2 * NUM_SCORES + np.minimum(depths, MOST_LEVELS) - 1
        return np.broadcast_to(bins, (number,)), GUESS
    return np.searchsorted(EDGES, scores) + NUM_SCORES * is_first_draw, np.where(is_first_draw, GUESS, scores)
