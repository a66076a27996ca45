"""Drafts on the host: as they were given, less some nodes, and compared with what was said then."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import ProposerBatch
from specdec_core.drafting.acceptance import Acceptance


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
