"""A draft as numpy arrays with an entry per draft token (node), and drafts of which some nodes are cut away."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.contracts.draft import Draft


@frozen(eq=False)
class Nodes:
    """The draft tokens of all requests. Dead (padding) nodes are marked, and their descendants are dead, too."""

    requests: np.ndarray  # int64 [n]
    parents: np.ndarray  # int64 [n]   index over all requests; -1: the root; DEAD
    depths: np.ndarray  # int64 [n]   from 1 on
    is_alive: np.ndarray  # bool [n]
    token_ids: np.ndarray  # int64 [n]
    scores: np.ndarray | None  # float32 [n]
    is_first_draw: np.ndarray  # bool [n]   the first of sampled siblings
    is_sampled_request: np.ndarray  # bool [batch]   requests with a sampled node

    @classmethod
    def of(cls, draft: Draft) -> Nodes:
        counts, layout = draft.num_nodes_per_request, draft.host_layout
        requests = np.repeat(np.arange(draft.batch_size), counts)
        parents = draft.host_parents.astype(np.int64)
        parents = np.where(parents < 0, parents, parents + np.array(draft.offsets)[requests])
        is_first_draw = np.zeros(draft.num_nodes, dtype=bool)
        is_sampled_request = np.zeros(draft.batch_size, dtype=bool)
        if draft.q_rows is not None:
            q_rows, first = np.unique(np.where(layout.is_alive, draft.on_host(draft.q_rows), -1), return_index=True)
            is_first_draw[first[q_rows >= 0]] = True
            is_sampled_request[requests[is_first_draw]] = True
        return cls(
            requests=requests,
            parents=parents,
            depths=layout.row_depths[layout.node_rows],
            is_alive=layout.is_alive,
            token_ids=draft.host_token_ids,
            scores=None if draft.scores is None else draft.on_host(draft.scores),
            is_first_draw=is_first_draw,
            is_sampled_request=is_sampled_request,
        )

    def down_the_tree(self, values: np.ndarray) -> np.ndarray:
        """The product of `values` [n] along the path from the root to each node; for booleans, whether all hold."""
        product = values.copy()
        below = np.flatnonzero(self.parents >= 0)
        for depth in range(2, int(self.depths.max(initial=0)) + 1):
            level = below[self.depths[below] == depth]
            product[level] = values[level] * product[self.parents[level]]
        return product


def without(draft: Draft, nodes: Nodes, kept: np.ndarray) -> Draft:
    """Return a copy of the draft that has only the draft tokens marked in `kept`, bool [num_nodes]. The parents of kept
    nodes must be kept. Dead (padding) nodes that are kept stay dead."""
    counts = np.bincount(nodes.requests[kept], minlength=draft.batch_size).tolist()
    if not any(counts):
        return Draft.from_chains([[]] * draft.batch_size, draft.token_ids.device)
    offsets = tuple(accumulate(counts, initial=0))
    own = (np.cumsum(kept) - 1)[nodes.parents.clip(min=0)] - np.array(offsets)[nodes.requests]
    parents = np.where(nodes.parents < 0, nodes.parents, own)[kept]
    mask = torch.from_numpy(kept).to(draft.token_ids.device)
    return evolve(
        draft,
        token_ids=draft.token_ids[mask],
        parents=torch.from_numpy(parents).to(draft.parents),
        offsets=offsets,
        max_depth=int(nodes.depths[kept & nodes.is_alive].max(initial=0)),
        q_rows=None if draft.q_rows is None else draft.q_rows[mask],
        scores=None if draft.scores is None else draft.scores[mask],
    )
