"""Statistics of past drafts, such as the acceptance rate by draft probability, for deciding how many tokens to
draft."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import ProposerBatch

EDGES = np.array([0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
NUM_BINS = len(EDGES) + 1
MOST_LEVELS = 16  # deeper levels are counted in the last
DECAY = 1 - 1 / 128
PRIOR_WEIGHT, DEPTH_PRIOR_WEIGHT = 2, 4  # pseudo-counts of the prior expectations


@frozen(eq=False)
class Nodes:
    """The draft tokens (tree nodes) of all requests, as numpy arrays. `levels` groups their indices by depth and leaves
    out dead (padding) nodes."""

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
    """Acceptance statistics of each request, which predict how likely its next draft tokens are to be accepted.

    Draft tokens are counted in bins of similar draft probability. A token counts only if its parent was accepted, since
    otherwise it was not verified. Requests share no statistics, because temperature and prompt decide how good a draft
    is. So if costs are fixed in the config, a request's drafts depend on its own past only.

    Without statistics, a token's predicted acceptance is the probability that the draft model gave it, or 1 for the
    first token sampled from a distribution. Later this value, times the request's ratio of accepted to predicted
    tokens, is a prior with the weight of PRIOR_WEIGHT observed tokens.

    Counts decay by 1/128 with each step in which the request may have a draft. So a request that gets no drafts any
    more, because too many were rejected, will be tried again.
    """

    def __init__(self, num_rows: int) -> None:
        nodes, levels = (num_rows, 2 * NUM_BINS), (num_rows, MOST_LEVELS)
        self._tried, self._accepted = np.zeros(nodes), np.zeros(nodes)  # first draws are in the second half
        self._predicted = np.zeros(num_rows)  # sum of predicted probabilities over the nodes that were tried
        self._levels_tried, self._levels_accepted = np.zeros(levels), np.zeros(levels)
        self._spent, self._gained = np.zeros(num_rows), np.zeros(num_rows)
        self._all: tuple[np.ndarray, ...] = tuple(vars(self).values())

    def clear(self, row: int) -> None:
        for counts in self._all:
            counts[row] = 0

    def age(self, rows: np.ndarray) -> None:
        """Multiply the counts of these requests by DECAY. rows: int64 [n], their rows in these statistics."""
        for counts in self._all:
            counts[rows] *= DECAY

    def add_nodes(
        self, rows: np.ndarray, depth: int, probs: np.ndarray, is_first_draw: np.ndarray, is_accepted: np.ndarray
    ) -> None:
        """Add draft tokens of one depth (1: children of the root), whose parents were accepted, to the counts.

        rows: int64 [n], the row of each token's request in these statistics.
        probs: float [n], the probability that the draft model gave each token.
        is_first_draw: bool [n], whether the token is the first sampled from its distribution.
        is_accepted: bool [n].
        """
        bins, predicted = _bins_and_predictions(probs, is_first_draw)
        np.add.at(self._tried, (rows, bins), 1)
        np.add.at(self._accepted, (rows, bins), is_accepted)
        np.add.at(self._predicted, rows, predicted)
        level = min(depth, MOST_LEVELS) - 1
        self._levels_tried[np.unique(rows), level] += 1
        self._levels_accepted[rows[is_accepted], level] += 1

    def add_steps(self, rows: np.ndarray, spent: np.ndarray, gained: np.ndarray) -> None:
        """Add a step of each request to the counts.

        rows: int64 [n], the requests' rows in these statistics.
        spent: float64 [n], the cost of the step, in forward passes of the target.
        gained: float64 [n], how many tokens the request emitted.
        """
        self._spent[rows] += spent
        self._gained[rows] += gained

    def of_nodes(self, rows: np.ndarray, probs: np.ndarray, is_first_draw: np.ndarray) -> np.ndarray:
        """float64 [n]   predicted probability that each draft token is accepted if its parent is.

        rows: int64 [n], the row of each token's request in these statistics.
        probs: float [n], the probability that the draft model gave each token.
        is_first_draw: bool [n], whether the token is the first sampled from its distribution.
        """
        bins, predicted = _bins_and_predictions(probs, is_first_draw)
        ratio = (self._accepted[rows].sum(axis=-1) + 1) / (self._predicted[rows] + 1)
        prior = np.minimum(predicted * ratio, 1)
        tried, accepted = self._tried[rows, bins], self._accepted[rows, bins]
        expected: np.ndarray = (accepted + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)
        return expected

    def of_level(self, rows: np.ndarray, depth: int) -> np.ndarray:
        """float64 [n]   for each request, the predicted probability that a draft token of this depth is accepted after
        one of the previous depth was. rows: int64 [n], the requests' rows in these statistics."""
        tried, accepted = self._levels_tried[rows], self._levels_accepted[rows]
        anywhere = (accepted.sum(axis=-1) + 1) / (tried.sum(axis=-1) + 1)
        level = min(depth, MOST_LEVELS) - 1
        prior = DEPTH_PRIOR_WEIGHT * anywhere
        expected: np.ndarray = (accepted[:, level] + prior) / (tried[:, level] + DEPTH_PRIOR_WEIGHT)
        return expected

    def cost_per_token(self, rows: np.ndarray) -> np.ndarray:
        """float64 [n]   each request's average cost per emitted token, in forward passes of the target. It is 1 while
        the request has no drafts."""
        cost: np.ndarray = (self._spent[rows] + 1) / (self._gained[rows] + 1)
        return cost


def _bins_and_predictions(probs: np.ndarray, is_first_draw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.searchsorted(EDGES, probs) + NUM_BINS * is_first_draw, np.where(is_first_draw, 1, probs)


class StepDrafts:
    """Remembers the drafts of one step until the emitted tokens show which draft tokens were accepted."""

    def __init__(self, batch: ProposerBatch, rows: np.ndarray, *, is_priced: bool) -> None:
        self._requests, self._rows, self._is_priced = batch.requests, rows, is_priced
        self._num_tokens = [len(request.token_ids) for request in batch.requests]
        self._is_known = np.ones(len(rows), dtype=bool)
        self.spent = np.ones(len(rows))  # in forward passes of the target: its own and the cost of the draft
        self.nodes: Nodes | None = None
        self.level_s: float | None = None  # seconds to draft a level

    def forget(self, row: int) -> None:
        self._is_known &= self._rows != row

    def learn(self, acceptance: Acceptance) -> None:
        """Compare the drafts with the tokens emitted afterwards, and add the result to `acceptance`. A request without
        draft tokens counts as having emitted one token. A request that emitted nothing is not counted."""
        nodes = self.nodes
        if nodes is None:
            return
        texts = np.full((len(self._rows), len(nodes.levels)), -1)
        for b in np.flatnonzero(self._is_known).tolist():
            new = self._requests[b].token_ids[self._num_tokens[b] :]
            self._is_known[b] = len(new) > 0
            first = new[: texts.shape[1]]
            texts[b, : len(first)] = first
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
    """Return a copy of the draft that has only the draft tokens (nodes) marked in `kept`, bool [num_nodes]. The parents
    of kept nodes must be kept. Dead (padding) nodes stay dead."""
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
