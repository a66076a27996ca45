"""Drafts as numpy arrays with an entry per draft token (node), and drafts of which some nodes are cut away."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.contracts.draft import DEAD, Draft

TINY = 1e-30
"""Takes the place of 0 where logarithms are needed."""


@frozen(eq=False)
class Nodes:
    """The draft tokens of one or more drafts. `requests` counts through the requests of all drafts."""

    requests: np.ndarray  # int64 [n]
    parents: np.ndarray  # int64 [n]   index among all of these nodes; -1: the root; DEAD
    depths: np.ndarray  # int64 [n]   from 1 on; 0 at dead (padding) nodes and below them
    token_ids: np.ndarray  # int64 [n]
    scores: np.ndarray | None  # float32 [n]   None: of none
    is_first: np.ndarray  # bool [n]   the first of sampled siblings
    is_chain: bool

    @classmethod
    def of(cls, *drafts: Draft) -> Nodes:
        counts = np.array([count for draft in drafts for count in draft.num_nodes_per_request])
        requests = np.repeat(np.arange(len(counts)), counts)
        starts = counts.cumsum() - counts
        own = _joined([draft.host_parents for draft in drafts]).astype(np.int64)
        parents = np.where(own < 0, own, own + starts[requests])
        is_chain = all(draft.is_chain for draft in drafts) and not (own == DEAD).any()
        if is_chain:
            depths = np.arange(1, len(own) + 1) - starts[requests]
        else:
            depths = (own == -1).astype(np.int64)
            for depth in range(1, max(draft.max_depth for draft in drafts)):
                depths[(parents >= 0) & (depths[parents.clip(min=0)] == depth)] = depth + 1
        has_scores = all(draft.scores is not None or not draft.num_nodes for draft in drafts)
        scores = [draft.on_host(draft.scores) for draft in drafts if draft.scores is not None]
        is_first = [_first_of_siblings(draft) for draft in drafts]
        return cls(
            requests=requests,
            parents=parents,
            depths=depths,
            token_ids=_joined([draft.host_token_ids for draft in drafts]),
            scores=_joined(scores) if has_scores and scores else None,
            is_first=_joined(is_first) & (depths > 0),
            is_chain=is_chain,
        )

    def accepted(self, texts: np.ndarray) -> np.ndarray:
        """bool [n]   whether the texts contain each draft token and those above it. texts: int64 [requests, length],
        the tokens that follow each request's root; -1: none, or not known."""
        is_right = self.token_ids == texts[self.requests, self.depths - 1]
        return self.down_the_tree(is_right & (self.depths > 0))

    def down_the_tree(self, values: np.ndarray) -> np.ndarray:
        """The product of `values` [n], 0 to 1, along the path from the root to each node; for booleans, whether all
        hold. Dead nodes keep their own value."""
        if self.is_chain and values.dtype == bool:
            so_far = np.concatenate([[0], (~values).cumsum()])  # nodes that do not hold
            hold: np.ndarray = so_far[1:] == so_far[np.arange(len(values)) + 1 - self.depths]
            return hold
        if self.is_chain:
            logs = np.concatenate([[0.0], np.log(np.maximum(values, TINY)).cumsum()])
            chained: np.ndarray = np.exp(logs[1:] - logs[np.arange(len(values)) + 1 - self.depths])
            return chained
        product = values.copy()
        for depth in range(2, int(self.depths.max(initial=0)) + 1):
            level = self.depths == depth
            product[level] *= product[self.parents[level]]
        return product


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _first_of_siblings(draft: Draft) -> np.ndarray:
    """bool [num_nodes]   whether a node is the first that was sampled from its row of q."""
    is_first = np.zeros(draft.num_nodes, dtype=bool)
    if draft.q_rows is not None:
        q_rows = np.where(draft.host_parents != DEAD, draft.on_host(draft.q_rows), -1)
        q_rows, first = np.unique(q_rows, return_index=True)
        is_first[first[q_rows >= 0]] = True
    return is_first


def without(draft: Draft, nodes: Nodes, kept: np.ndarray) -> Draft:
    """Return a copy of the draft that has only the draft tokens marked in `kept`, bool [num_nodes]. The parents of kept
    nodes must be kept. Dead (padding) nodes that are kept stay dead."""
    counts = np.bincount(nodes.requests[kept], minlength=draft.batch_size).tolist()
    assert kept[nodes.parents[kept & (nodes.parents >= 0)]].all(), "a node would get another parent"
    if not any(counts):
        return Draft.from_chains([[]] * draft.batch_size, draft.token_ids.device)
    offsets = tuple(accumulate(counts, initial=0))
    own = (kept.cumsum() - 1)[nodes.parents] - np.array(offsets)[nodes.requests]
    parents = np.where(nodes.parents < 0, nodes.parents, own)[kept].astype(np.int32)

    def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else torch.from_numpy(draft.on_host(tensor)[kept])

    cut = evolve(
        draft,
        token_ids=torch.from_numpy(draft.host_token_ids[kept]),
        parents=torch.from_numpy(parents),
        offsets=offsets,
        max_depth=int(nodes.depths[kept].max(initial=0)),
        q_rows=part(draft.q_rows),
        scores=part(draft.scores),
    )
    return cut.to(draft.token_ids.device)  # which keeps copies on the host
