"""Adaptive draft length: stops drafting where another level, or another draft token, is expected to gain less than it
costs."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from attrs import evolve, frozen

from specdec_core.config.draft_options import DraftStopConfig
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import ProposerBatch, RequestView
from specdec_core.drafting.acceptance import Acceptance, Nodes, StepDrafts, without
from specdec_core.drafting.rows import RequestRows

MOST_UNMEASURED = 64
"""Until costs are measured, every second step runs without drafts, which the measurement needs. After this many steps
without a result, all steps have drafts again."""
NUM_SKIPPED, NUM_TIMED = 4, 8
"""The time of a level is measured in NUM_TIMED drafts, after NUM_SKIPPED drafts in which memory is allocated and code
compiled."""


@frozen
class Prices:
    """The cost of drafting one more level, and of verifying one more draft token (node). The unit is the cost of a
    forward pass of the target without draft tokens, divided by the number of requests."""

    level: float
    node: float
    is_shared: bool  # whether all requests together pay `level` once per level, or each of them


class DraftStop:
    """Decides for each request how many levels and tokens to draft, if adaptive_draft_length is on.

    A proposer has one DraftStop and calls its `start` and `finish` for each request. In `propose`, the proposer calls
    `begin` and passes the result to `StaticTree` or `DynamicTree`.

    forwards_roots: whether drafting begins with a forward pass over each request's last token. If so, the first level
        costs as much as any other; else it costs nothing. True for a draft model and for `LastHiddenProposer`; False
        for `FeatureProposer`, whose `observe` has run the head on the last token already.
    """

    def __init__(self, config: DraftStopConfig, max_num_seqs: int, *, forwards_roots: bool = False) -> None:
        self._config, self._forwards_roots = config, forwards_roots
        self._acceptance = Acceptance(max_num_seqs)
        self._rows = RequestRows(max_num_seqs)
        self._last: StepDrafts | None = None
        self._num_unmeasured = 0
        self._level_s, self._num_timed = np.zeros(NUM_SKIPPED + NUM_TIMED), 0  # of a level of each of the first drafts
        self._median_level_s: float | None = None

    def start(self, request: RequestView) -> None:
        self._rows.start(request)

    def finish(self, request: RequestView) -> None:
        """Forget a request. May be called twice, and for a request that did not start."""
        if (row := self._rows.get(request)) is not None:
            if self._last is not None:
                self._last.forget(row)
            self._acceptance.clear(row)
            self._rows.finish(request)

    def begin(self, batch: ProposerBatch) -> Stopping | None:
        """Learn from the last step's drafts and return the `Stopping` for this call of `propose`; None if
        adaptive_draft_length is off."""
        if not self._config.adaptive_draft_length:
            return None
        if self._last is not None:
            self._last.learn(self._acceptance)
            if self._last.level_s is not None and self._num_timed < len(self._level_s):
                self._level_s[self._num_timed] = self._last.level_s
                self._num_timed += 1
        rows = np.array(self._rows.of(batch.requests))
        self._acceptance.age(rows)
        prices = self._prices(batch)
        if prices is None:
            self._num_unmeasured += 1
        is_skipped = prices is None and self._num_unmeasured % 2 == 0 and self._num_unmeasured <= MOST_UNMEASURED
        stopping = Stopping(batch, rows, self._acceptance, prices, is_skipped, self._forwards_roots)
        self._last = stopping.step_drafts
        return stopping

    def _prices(self, batch: ProposerBatch) -> Prices | None:
        config, costs = self._config, batch.costs
        if config.draft_level_cost is not None and config.draft_node_cost is not None:
            return Prices(config.draft_level_cost, config.draft_node_cost, is_shared=False)
        if costs is None or self._num_timed < len(self._level_s):
            return None
        if self._median_level_s is None:
            self._median_level_s = float(np.median(self._level_s[NUM_SKIPPED:]))
        share = costs.target_s / len(batch.requests) + costs.token_s
        return Prices(self._median_level_s / share, costs.token_s / share, is_shared=True)


class Stopping:
    """Decides in one step how many levels and tokens to draft for each request.

    Dropping a sampled token because of its value would change the output's distribution (docs/losslessness.md). So
    whether to draft a token is decided before the token is drawn. Later, tokens are dropped only in requests without
    sampled tokens.

    drafting: indices of the requests that get a draft, ascending.
    """

    def __init__(
        self,
        batch: ProposerBatch,
        rows: np.ndarray,
        acceptance: Acceptance,
        prices: Prices | None,
        is_skipped: bool,
        forwards_roots: bool,
    ) -> None:
        self._rows, self._acceptance, self._prices = rows, acceptance, prices
        self._cost_per_token = acceptance.cost_per_token(rows)
        self._depth, self._started = 1, perf_counter()
        self.step_drafts = StepDrafts(batch, rows, is_priced=prices is not None)
        drafting = np.full(len(rows), not is_skipped)
        if prices is not None:
            first = prices if forwards_roots else evolve(prices, level=0)
            drafting = self._pays(acceptance.of_level(rows, 1), np.ones(len(rows)), first)
        self.drafting: list[int] = np.flatnonzero(drafting).tolist()
        self._reach = np.ones(len(self.drafting))  # expected probability that a node of the frontier is accepted

    def goes_on(
        self,
        requests: np.ndarray,
        rows: np.ndarray,
        probs: np.ndarray,
        is_first_draw: np.ndarray,
        num_nodes: np.ndarray,
    ) -> np.ndarray:
        """bool [batch]   the requests that get another level below the one that was just grown.

        requests: int64 [n], the request of each draft token of the level just grown, as index into the batch.
        rows: int64 [n], the index of each token's parent among the previous call's tokens, without the requests that
            this call stopped. In the first call: the index of the token's request in `drafting`.
        probs: float [n], the draft model's probability of each token.
        is_first_draw: bool [n], whether a token is the first of sampled siblings.
        num_nodes: int64 [batch], the most draft tokens that the next level may have.
        """
        reach = self._reach[rows] * self._acceptance.of_nodes(self._rows[requests], probs, is_first_draw)
        goes = num_nodes > 0
        if self._prices is not None:
            expected = np.bincount(requests, reach, minlength=len(self._rows))
            expected = np.minimum(expected, 1) * self._acceptance.of_level(self._rows, self._depth + 1)
            goes = self._pays(expected, num_nodes, self._prices)
        self._depth += bool(goes.any())
        self._reach = reach[goes[requests]]
        return goes

    def keep(self, draft: Draft, *, in_place: bool) -> Draft:
        """Drop draft tokens that are expected to gain less than their verification costs. Requests with sampled tokens
        keep all of theirs. Called once, with the finished draft, which must have `scores`.

        in_place: drop only a request's last draft tokens, so that the others keep their indices.
        """
        self.step_drafts.nodes = nodes = Nodes.of(draft)
        if draft.num_nodes:
            self.step_drafts.level_s = (perf_counter() - self._started) / self._depth
        node_price = self._prices.node if self._prices else 0
        if node_price and draft.num_nodes:
            expected = self._acceptance.of_nodes(self._rows[nodes.requests], nodes.probs, nodes.is_first_draw)
            is_alive = np.zeros(len(expected), dtype=bool)
            for level in nodes.levels:
                above, is_alive[level] = nodes.parents[level], True
                expected[level] *= np.where(above < 0, 1, expected[above])
            kept = is_alive & (expected * self._cost_per_token[nodes.requests] > node_price)
            kept |= nodes.is_sampled_request[nodes.requests]
            if in_place:
                last = np.full(len(self._rows), -1, dtype=np.int64)
                np.maximum.at(last, nodes.requests[kept], np.flatnonzero(kept))
                kept = np.arange(len(kept)) <= last[nodes.requests]
            if not kept.all():
                draft = without(draft, nodes, kept)
                self.step_drafts.nodes = nodes = Nodes.of(draft)
        self.step_drafts.spent += node_price * np.bincount(nodes.requests, minlength=len(self._rows))
        return draft

    def _pays(self, expected: np.ndarray, num_nodes: np.ndarray, prices: Prices) -> np.ndarray:
        """bool [batch]   the requests for which another level gains more than it costs. Adds the costs of these levels
        to the step's costs.

        expected: float64 [batch], how many more accepted tokens the level is expected to bring.
        num_nodes: [batch], the number of its draft tokens.
        """
        gain = expected * self._cost_per_token - prices.node * num_nodes
        price = prices.level
        pays: np.ndarray = (num_nodes > 0) & (gain > (0 if prices.is_shared else price))
        if prices.is_shared:
            pays &= gain[pays].sum() > price
            price /= max(1, int(pays.sum()))
        self.step_drafts.spent += price * pays
        return pays
