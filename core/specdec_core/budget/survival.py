"""How likely a proposer's draft tokens are to be accepted, learned from its earlier drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from attrs import frozen

from specdec_core.budget.nodes import Nodes
from specdec_core.budget.rates import Rates
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import RequestView
from specdec_core.drafting.rows import RequestRows

EDGES = np.array([0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
"""Of the bins of similar score."""
NUM_SCORES = len(EDGES) + 1
MOST_LEVELS = 32
"""Deeper draft tokens count as ones of this depth."""
FOUND = 0.9
"""How often to assume that a proposer finds any draft token where it is asked for some."""
GUESS = 0.7
"""The acceptance rate to assume of draft tokens without scores, of sampled ones, and of levels."""
MIDDLES = np.convolve(np.concatenate([[0.0], EDGES, [1.0]]), [0.5, 0.5], mode="valid")
NODES = np.concatenate([MIDDLES, np.full(NUM_SCORES, GUESS)])
"""The acceptance rates to assume of nodes with a score: of chosen ones, and of first sampled ones."""
LEVELS = len(NODES)
REACHED, ANY = LEVELS + MOST_LEVELS, LEVELS + 2 * MOST_LEVELS
"""The first bins of the tables: nodes with a score, levels, levels that are drafted at all, and whether any is."""


@frozen(eq=False)
class Past:
    """A draft, and how many tokens its requests had then."""

    requests: Sequence[RequestView]
    rows: np.ndarray  # int64 [batch]   of the requests
    num_tokens: Sequence[int]
    limits: Sequence[int]  # the most draft tokens that each could have had
    draft: Draft
    has_shadows: bool = False  # some of the requests have drafted in shadow (`Retries`)


class Survival:
    """Estimates for one proposer how likely draft tokens are to be accepted, given that their parents are.

    Single tokens go by the score that the proposer gave them. Levels, of which no token is known yet, and tokens
    without a score go by their depth. So does how often a level is drafted at all and accepted, where drafts may end
    early: deeper ones are drafted where they are likely to be accepted. All depend on the request's temperature
    and recent drafts (`Rates`), and so does how often there is any draft token. Requests are named by their rows.

    Attribute: watch, called with the estimates, float64 [n], of draft tokens (of levels, if there are no scores) whose
    parents were accepted, and whether they were, bool [n], before that is learned; None: it is not called.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.watch: Callable[[np.ndarray, np.ndarray], None] | None = None
        self._rows = RequestRows(max_num_seqs)
        self._rates = Rates(max_num_seqs, NODES, *np.full((2, MOST_LEVELS), GUESS), np.array([FOUND]))

    def start(self, request: RequestView, *, is_sampled: bool, may_sample: bool = False) -> None:
        """is_sampled: whether the request has a temperature above 0. may_sample: as in `ProposerBatch`."""
        row, group = self._rows.start(request), is_sampled + (is_sampled and may_sample)
        self._rates.start(row, group)

    def finish(self, request: RequestView) -> None:
        self._rows.finish(request)

    @property
    def num_requests(self) -> int:
        return len(self._rows)

    def group(self, request: RequestView) -> int:
        """That of `Rates`: new requests of the same one have the same estimates. -1: the request did not start."""
        row = self._rows.get(request)
        return -1 if row is None else self._rates.group(row)

    def rows(self, requests: Sequence[RequestView]) -> np.ndarray:
        """int64 [n]   the rows of these requests."""
        return np.array(self._rows.of(requests))

    def update(self, rows: np.ndarray) -> None:
        """Update the estimates for these rows by what was learned since."""
        self._rates.update(rows)

    def of_any(self, rows: np.ndarray) -> np.ndarray:
        """float64 [n]   the probability that the proposer finds any draft token for a request."""
        found: np.ndarray = self._rates.estimates[rows, ANY]
        return found

    def of_levels(self, rows: np.ndarray, above: int, number: int) -> np.ndarray:
        """float64 [n, number]   the probability that a token of each of the levels below depth `above` is accepted, if
        one was in the level before."""
        return self._columns(rows, LEVELS, above, number)

    def of_depths(self, rows: np.ndarray, number: int) -> np.ndarray:
        """float64 [n, number]   the probability that a token of each of the first levels is drafted and accepted, if
        one was in the level before."""
        return self._columns(rows, REACHED, 0, number)

    def of_nodes(self, rows: np.ndarray, scores: np.ndarray, is_first: np.ndarray) -> np.ndarray:
        """float64 [n]   the probability that each draft token is accepted, if its parent is. rows: those of the tokens'
        requests. scores: float [n], the proposer's estimates. is_first: bool [n], the first of sampled siblings."""
        found: np.ndarray = self._rates.estimates[rows, EDGES.searchsorted(scores) + NUM_SCORES * is_first]
        return found

    def learn(self, past: Sequence[Past]) -> None:
        """Compare drafts with the tokens that their requests have emitted since, in later steps, too. Nothing is
        learned of draft tokens that are deeper than this text, or whose request has no row any more."""
        past = sorted(past, key=lambda each: not each.draft.num_nodes)  # of empty ones, at the end, only that counts
        rows = np.concatenate([each.rows for each in past])
        is_here = np.array([self._rows.get(request) is not None for each in past for request in each.requests])
        past = past[: max(1, sum(each.draft.num_nodes > 0 for each in past))]
        nodes = Nodes.of(*(each.draft for each in past))
        width, is_alive = int(nodes.depths.max(initial=0)), nodes.depths > 0
        found = np.bincount(nodes.requests[is_alive], minlength=len(rows)) > 0
        new = [(rows[is_here], np.full(int(is_here.sum()), ANY), found[is_here])]
        if width:
            num_drafted = sum(len(each.requests) for each in past)
            rows, is_here, found = rows[:num_drafted], is_here[:num_drafted], found[:num_drafted]
            new += self._accepted(past, nodes, rows, is_here & found)
        self._rates.add(*map(np.concatenate, zip(*new, strict=True)))

    def num_accepted(self, past: Past) -> int:
        """How many draft tokens of a draft agree with the text that its requests have emitted since."""
        nodes = Nodes.of(past.draft)
        is_accepted = nodes.accepted(self._texts([past], int(nodes.depths.max(initial=0)) + 1))
        deepest = np.zeros(len(past.requests), dtype=np.int64)
        np.maximum.at(deepest, nodes.requests[is_accepted], nodes.depths[is_accepted])
        return int(deepest.sum())

    def _accepted(
        self, past: Sequence[Past], nodes: Nodes, rows: np.ndarray, may_miss: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """What to count of draft tokens and of levels: as the arguments of `Rates.add`.

        rows: of the requests of `nodes`. may_miss: bool [requests], for which levels that were not drafted count, too.
        """
        width, is_alive = int(nodes.depths.max()), nodes.depths > 0
        texts = self._texts(past, width + 1)
        followed_by = texts[nodes.requests, nodes.depths - 1]
        is_accepted = nodes.accepted(texts)
        is_tried = is_alive & (followed_by >= 0) & ((nodes.parents < 0) | is_accepted[nodes.parents])
        if not is_tried.any():
            return
        requests, accepted, depths = nodes.requests[is_tried], is_accepted[is_tried], nodes.depths[is_tried]
        if nodes.scores is not None:
            bins = EDGES.searchsorted(nodes.scores[is_tried]) + NUM_SCORES * nodes.is_first[is_tried]
            self._show(rows[requests], bins, accepted)
            yield rows[requests], bins, accepted
        levels = requests * width + depths - 1
        if not nodes.is_chain:
            is_level_accepted = np.zeros(len(texts) * width, dtype=bool)
            is_level_accepted[levels[accepted]] = True
            levels = np.unique(levels)
            accepted = is_level_accepted[levels]
        requests, depths = np.divmod(levels, width)
        depths = np.minimum(depths, MOST_LEVELS - 1)
        if nodes.scores is None:
            self._show(rows[requests], LEVELS + depths, accepted)
        yield rows[requests], LEVELS + depths, accepted
        # Where all levels were accepted, the next one is one that was not drafted, unless it would be beyond the limit.
        deepest, num_accepted = np.zeros((2, len(rows)), dtype=np.int64)
        np.maximum.at(deepest, nodes.requests[is_alive], nodes.depths[is_alive])
        np.maximum.at(num_accepted, requests[accepted], depths[accepted] + 1)
        is_short = may_miss & (deepest < np.concatenate([each.limits for each in past]))
        is_short &= texts[np.arange(len(rows)), deepest] >= 0  # else it is not counted of deeper drafts, either
        ended = np.flatnonzero(is_short & (num_accepted == deepest.clip(max=MOST_LEVELS - 1)))
        yield rows[requests], REACHED + depths, accepted
        yield rows[ended], REACHED + deepest[ended].clip(max=MOST_LEVELS - 1), np.zeros(len(ended), dtype=bool)

    def _show(self, rows: np.ndarray, bins: np.ndarray, accepted: np.ndarray) -> None:
        if self.watch is not None:
            self.watch(self._rates.estimates[rows, bins], accepted)

    def _texts(self, past: Sequence[Past], width: int) -> np.ndarray:
        """int64 [number of requests in all drafts, width]   the tokens that followed; -1: none, or not known."""
        texts = np.full((sum(len(each.requests) for each in past), width), -1)
        i = 0
        for each in past:
            for request, number in zip(each.requests, each.num_tokens, strict=True):
                if self._rows.get(request) is not None:
                    new = request.token_ids[number : number + width]
                    texts[i, : len(new)] = new
                i += 1
        return texts

    def _columns(self, rows: np.ndarray, table: int, first: int, number: int) -> np.ndarray:
        """float64 [n, number]   the estimates of these rows for levels from `first` on. Levels below the last one of
        the table are as that. table: its first bin."""
        if first + number <= MOST_LEVELS:
            return self._rates.estimates[rows, table + first : table + first + number]
        columns = table + np.minimum(np.arange(first, first + number), MOST_LEVELS - 1)
        found: np.ndarray = self._rates.estimates[rows[:, None], columns]
        return found
