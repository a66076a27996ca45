"""Drafts on the host: less some nodes, what became of them, and what later ones may be expected to be worth."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import ProposerBatch

EDGES = np.array([0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
NUM_BINS = len(EDGES) + 1
MOST_LEVELS = 16  # deeper ones count as the last of these
AGEING = 1 - 1 / 128
BELIEF, DEPTH_BELIEF = 2, 4  # observations that an expectation without any is worth


@frozen(eq=False)
class Nodes:
    """A draft on the host, over all requests. Dead nodes are in no level."""

    requests: np.ndarray  # int64 [n]
    parents: np.ndarray  # int64 [n]   index over all requests; -1: the root; DEAD
    token_ids: np.ndarray
    probs: np.ndarray
    is_first_draw: np.ndarray  # bool [n]
    is_sampled_request: np.ndarray  # bool [batch]
    levels: list[np.ndarray]  # the nodes of each depth, from 1 on

    @classmethod
    def of(cls, draft: Draft) -> Nodes:
        assert draft.scores is not None or not draft.num_nodes, "a draft is judged by its scores"
        requests = np.repeat(np.arange(draft.batch_size), draft.num_nodes_per_request)
        parents = draft.host_parents.astype(np.int64)
        parents = np.where(parents < 0, parents, parents + np.array(draft.offsets)[requests])
        is_first_draw = np.zeros(draft.num_nodes, dtype=bool)
        if draft.q_rows is not None:
            q_rows = np.where(draft.host_layout.is_alive, draft.on_host(draft.q_rows), -1)
            q_rows, first = np.unique(q_rows, return_index=True)
            is_first_draw[first[q_rows >= 0]] = True
        is_sampled_request = np.zeros(draft.batch_size, dtype=bool)
        is_sampled_request[requests[is_first_draw]] = True
        levels, is_here = [], parents == -1
        while is_here.any():
            levels.append(np.flatnonzero(is_here))
            is_here = (parents >= 0) & is_here[parents.clip(min=0)]
        probs = np.empty(0) if draft.scores is None else draft.on_host(draft.scores)
        return cls(requests, parents, draft.host_token_ids, probs, is_first_draw, is_sampled_request, levels)


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


class Drafted:
    """A step's drafts, until it is known what became of them."""

    def __init__(self, batch: ProposerBatch, rows: np.ndarray, *, is_priced: bool) -> None:
        self._requests, self._rows, self._is_priced = batch.requests, rows, is_priced
        self._num_tokens = [len(request.token_ids) for request in batch.requests]
        self._is_known = np.ones(len(rows), dtype=bool)
        self.spent = np.ones(len(rows))  # for the target and what was drafted
        self.nodes: Nodes | None = None
        self.level_s: float | None = None  # what drafting a level of them took

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


def without(draft: Draft, nodes: Nodes, kept: np.ndarray) -> Draft:
    """The nodes that are kept, whose parents are. Dead ones stay dead."""
    counts = np.bincount(nodes.requests[kept], minlength=draft.batch_size).tolist()
    if not any(counts):
        return Draft.from_chains([[]] * draft.batch_size, draft.token_ids.device)
    offsets = tuple(accumulate(counts, initial=0))
    numbers = np.cumsum(kept) - 1
    own = numbers[nodes.parents.clip(min=0)] - np.array(offsets)[nodes.requests]
    parents = np.where(nodes.parents < 0, nodes.parents, own)[kept]
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


def on_host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
