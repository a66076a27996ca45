"""When drafting should stop: where another level of drafts, or another node, is expected to gain less than it costs."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.config import DraftStopConfig
from specdec_core.drafting.acceptance import Acceptance
from specdec_core.types import Draft, ProposerBatch, RequestView

MOST_UNMEASURED = 64
"""Steps in which drafts vary in length so that costs can be measured. Where nobody does, they are long from then on."""


@frozen
class Prices:
    """Relative to one request's share of a pass of the target over roots alone."""

    level: float
    node: float
    is_shared: bool  # one price of a level for all requests that have it, or one for each


class DraftStop:
    """Decides for each request how far to draft. A proposer keeps one, tells it of `start` and `finish`, and hands what
    `begin` returns to the tree that it grows.

    Without `adaptive_draft_length`, it lets everything be. forwards_roots: the draft forwards a root to have its logits
    (a draft model does, a head on the target's features has them anyway), so that there is a level to be saved by not
    drafting at all.
    """

    def __init__(self, config: DraftStopConfig, max_num_seqs: int, *, forwards_roots: bool = False) -> None:
        self._config, self._forwards_roots = config, forwards_roots
        self._acceptance = Acceptance(max_num_seqs)
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs))
        self._last: Drafted | None = None
        self._num_unmeasured = 0

    def start(self, request: RequestView) -> None:
        self._rows[request.id] = self._free_rows.pop()

    def finish(self, request: RequestView) -> None:
        row = self._rows.pop(request.id)
        self._acceptance.clear(row)
        self._free_rows.append(row)
        if self._last is not None:
            self._last.forget(row)

    def begin(self, batch: ProposerBatch) -> Stopping | None:
        """For one `propose`. None: nothing is to be stopped."""
        if not self._config.adaptive_draft_length:
            return None
        if self._last is not None:
            self._last.learn(self._acceptance)
        rows = np.array([self._rows[request.id] for request in batch.requests])
        self._acceptance.age(rows)
        prices = self._prices(batch)
        if prices is None:
            self._num_unmeasured += 1
        is_short = self._num_unmeasured % 2 == 0 and self._num_unmeasured <= MOST_UNMEASURED
        stopping = Stopping(batch, rows, self._acceptance, prices, is_short, self._forwards_roots)
        self._last = stopping.drafted
        return stopping

    def _prices(self, batch: ProposerBatch) -> Prices | None:
        config, costs = self._config, batch.costs
        if config.draft_level_cost is not None and config.draft_node_cost is not None:
            return Prices(config.draft_level_cost, config.draft_node_cost, is_shared=False)
        if costs is None:
            return None
        share = costs.target_s / len(batch.requests) + costs.token_s
        return Prices(costs.level_s / share, costs.token_s / share, is_shared=True)


class Stopping:
    """The decisions of one step. Each is made by what is known before the nodes that it is about are drawn, as rule 3
    asks (docs/losslessness.md); nodes that are there already are given up only where all of a request's are chosen."""

    def __init__(
        self,
        batch: ProposerBatch,
        rows: np.ndarray,
        acceptance: Acceptance,
        prices: Prices | None,
        is_short: bool,
        forwards_roots: bool,
    ) -> None:
        self._rows, self._acceptance, self._prices, self._is_short = rows, acceptance, prices, is_short
        self._cost_per_token = acceptance.cost_per_token(rows)
        self._depth = 0
        self.drafted = Drafted(batch, rows, is_priced=prices is not None)
        drafting = np.ones(len(rows), dtype=bool)
        if prices is not None:
            first = prices if forwards_roots else evolve(prices, level=0)
            drafting = self._pays(acceptance.of_level(rows, 1), np.ones(len(rows)), first)
        self._drafting = torch.from_numpy(np.flatnonzero(drafting)).to(batch.root_token_ids.device)
        self._reach = np.ones(len(self._drafting))  # expected probability that a node of the frontier is accepted

    @property
    def drafting(self) -> torch.Tensor:
        """int64 [n]   the requests that are to have a draft, ascending."""
        return self._drafting

    def goes_on(
        self,
        requests: torch.Tensor,
        rows: torch.Tensor,
        probs: torch.Tensor,
        is_first_draw: torch.Tensor,
        num_nodes: torch.Tensor,
    ) -> torch.Tensor:
        """bool [batch]: the requests that are to have another level below the one that was just grown.

        Of that level's nodes: requests int64 [n]; rows int64 [n], which node of the call before is the parent, counting
        those of requests that went on, or which of `drafting`; probs float [n], the draft's own; is_first_draw bool
        [n], the first of siblings that were sampled. num_nodes int64 [batch]: how many the next level may have.
        """
        of, probs_, is_first = (_host(each) for each in (requests, probs, is_first_draw))
        reach = self._reach[_host(rows)] * self._acceptance.of_nodes(self._rows[of], probs_, is_first)
        self._depth += 1
        more = _host(num_nodes)
        if self._prices is None:
            goes = np.full(len(self._rows), not self._is_short)
        else:
            expected = np.bincount(of, reach, minlength=len(self._rows))
            expected = np.minimum(expected, 1) * self._acceptance.of_level(self._rows, self._depth + 1)
            goes = self._pays(expected, more, self._prices)
        goes &= more > 0
        self._reach = reach[goes[of]]
        return torch.from_numpy(goes).to(requests.device)

    def keep(self, draft: Draft, *, in_place: bool) -> Draft:
        """What is to be verified of a draft with `scores`, and to be learned from. Call it once, at the end.

        Chosen nodes go that cost more than is expected of them; in_place: only from the end of a request's, so that the
        others keep their numbers.
        """
        self.drafted.nodes = nodes = Nodes.of(draft)
        node_price = self._prices.node if self._prices else 0
        if node_price and draft.num_nodes:
            expected = self._acceptance.of_nodes(self._rows[nodes.requests], nodes.probs, nodes.is_first_draw)
            for level in nodes.levels:
                above = nodes.parents[level]
                expected[level] *= np.where(above < 0, 1, expected[above])
            kept = expected * self._cost_per_token[nodes.requests] > node_price
            kept |= nodes.is_sampled_request[nodes.requests]
            if in_place:
                last = np.full(len(self._rows), -1)
                np.maximum.at(last, nodes.requests[kept], np.flatnonzero(kept))
                kept = np.arange(len(kept)) <= last[nodes.requests]
            if not kept.all():
                draft = _without(draft, nodes, kept)
                self.drafted.nodes = nodes = Nodes.of(draft)
        self.drafted.spent += node_price * np.bincount(nodes.requests, minlength=len(self._rows))
        return draft

    def _pays(self, expected: np.ndarray, num_nodes: np.ndarray, prices: Prices) -> np.ndarray:
        """bool [batch]   who should have another level, of so many nodes and so many expected tokens."""
        gain = expected * self._cost_per_token - prices.node * num_nodes
        price, pays = prices.level, gain > (0 if prices.is_shared else prices.level)
        if prices.is_shared:
            pays &= gain[pays].sum() > price
            price /= max(1, int(pays.sum()))
        self.drafted.spent += price * pays
        return pays


@frozen(eq=False)
class Nodes:
    """A draft on the host, over all requests."""

    requests: np.ndarray  # int64 [n]
    parents: np.ndarray  # int64 [n]   index over all requests; -1: the root
    token_ids: np.ndarray
    probs: np.ndarray
    is_first_draw: np.ndarray  # bool [n]
    is_sampled_request: np.ndarray  # bool [batch]
    levels: list[np.ndarray]  # the nodes of each depth, from 1 on

    @classmethod
    def of(cls, draft: Draft) -> Nodes:
        assert draft.scores is not None or not draft.num_nodes, "a draft is judged by its scores"
        requests = np.repeat(np.arange(draft.batch_size), draft.num_nodes_per_request)
        parents = _host(draft.parents).astype(np.int64)
        parents = np.where(parents < 0, -1, parents + np.array(draft.offsets)[requests])
        is_first_draw = np.zeros(draft.num_nodes, dtype=bool)
        if draft.q_rows is not None:
            q_rows, first = np.unique(_host(draft.q_rows), return_index=True)
            is_first_draw[first[q_rows >= 0]] = True
        is_sampled_request = np.zeros(draft.batch_size, dtype=bool)
        is_sampled_request[requests[is_first_draw]] = True
        levels, is_here = [], parents < 0
        while is_here.any():
            levels.append(np.flatnonzero(is_here))
            is_here = (parents >= 0) & is_here[parents]
        probs = np.empty(0) if draft.scores is None else _host(draft.scores)
        return cls(requests, parents, _host(draft.token_ids), probs, is_first_draw, is_sampled_request, levels)


class Drafted:
    """A step's drafts, until it is known what became of them."""

    def __init__(self, batch: ProposerBatch, rows: np.ndarray, *, is_priced: bool) -> None:
        self._requests, self._rows, self._is_priced = batch.requests, rows, is_priced
        self._num_tokens = [len(request.token_ids) for request in batch.requests]
        self._is_known = np.ones(len(rows), dtype=bool)
        self.spent = np.ones(len(rows))  # for the target and what was drafted
        self.nodes: Nodes | None = None

    def forget(self, row: int) -> None:
        self._is_known &= self._rows != row

    def learn(self, acceptance: Acceptance) -> None:
        """Count what the requests' texts say about these drafts. Those that have none count as steps that gave one
        token; those of requests that had to start over, not at all."""
        nodes = self.nodes
        if nodes is None:
            return
        texts = np.full((len(self._rows), len(nodes.levels)), -1)
        for b in np.flatnonzero(self._is_known).tolist():
            new = self._requests[b].token_ids[self._num_tokens[b] :]
            self._is_known[b] = len(new) > 0
            said = new[: texts.shape[1]]
            texts[b, : len(said)] = said
        is_accepted = np.zeros(len(nodes.requests), dtype=bool)
        gained = np.ones(len(self._rows))
        for depth, level in enumerate(nodes.levels):
            above, of = nodes.parents[level], nodes.requests[level]
            tried = level[self._is_known[of] & ((above < 0) | is_accepted[above])]
            of = nodes.requests[tried]
            is_accepted[tried] = accepted = nodes.token_ids[tried] == texts[of, depth]
            acceptance.add_nodes(self._rows[of], depth + 1, nodes.probs[tried], nodes.is_first_draw[tried], accepted)
            gained[of[accepted]] += 1
        if self._is_priced:
            known = self._is_known
            acceptance.add_steps(self._rows[known], self.spent[known], gained[known])


def _without(draft: Draft, nodes: Nodes, kept: np.ndarray) -> Draft:
    """The nodes that are kept, whose parents are."""
    counts = np.bincount(nodes.requests[kept], minlength=draft.batch_size).tolist()
    if not any(counts):
        return Draft.from_chains([[]] * draft.batch_size, draft.token_ids.device)
    offsets = tuple(accumulate(counts, initial=0))
    numbers = np.cumsum(kept) - 1
    parents = np.where(nodes.parents < 0, -1, numbers[nodes.parents] - np.array(offsets)[nodes.requests])[kept]
    mask = torch.from_numpy(kept).to(draft.token_ids.device)
    assert draft.scores is not None
    return evolve(
        draft,
        token_ids=draft.token_ids[mask],
        parents=torch.from_numpy(parents).to(draft.parents),
        offsets=offsets,
        max_depth=sum(bool(kept[level].any()) for level in nodes.levels),
        q_rows=None if draft.q_rows is None else draft.q_rows[mask],
        scores=draft.scores[mask],
    )


def _host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
