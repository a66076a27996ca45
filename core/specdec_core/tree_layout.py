"""Where each node of a draft stands: its row among the target's logits, its depth, its ancestors."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen

from specdec_core.types import DEAD, Draft


@frozen(eq=False)
class TreeLayout:
    """A draft's trees over the rows of target logits, on the draft's device.

    Walking `up` from a row ends at the request's root, or stays where it is at a root and at a dead node: a dead node,
    and all below one, has depth 0 (the root's position) and sees only itself.
    """

    row_requests: torch.Tensor  # int64 [num_rows]
    row_depths: torch.Tensor  # int64 [num_rows]   0 at roots and dead nodes
    up: torch.Tensor  # int64 [num_rows]   row of the parent
    root_rows: torch.Tensor  # int64 [batch]
    node_rows: torch.Tensor  # int64 [num_nodes]
    parent_rows: torch.Tensor  # int64 [num_nodes]   the root's row for a dead node
    is_alive: torch.Tensor  # bool [num_nodes]

    @classmethod
    def of(cls, draft: Draft) -> TreeLayout:
        device = draft.token_ids.device
        if draft.num_nodes == 0:
            rows_of_roots = torch.arange(draft.batch_size, device=device)
            depths, none = torch.zeros_like(rows_of_roots), rows_of_roots[:0]
            return cls(rows_of_roots, depths, rows_of_roots, rows_of_roots, none, none, none.bool())
        counts = np.asarray(draft.num_nodes_per_request, dtype=np.int64)
        requests = np.repeat(np.arange(draft.batch_size), counts + 1)
        roots = np.asarray(draft.offsets[:-1], dtype=np.int64) + np.arange(draft.batch_size)
        rows = np.arange(draft.num_nodes + draft.batch_size)
        is_node = np.ones(len(rows), dtype=bool)
        is_node[roots] = False

        row_requests = torch.from_numpy(requests).to(device)
        root_rows = torch.from_numpy(roots).to(device)
        node_rows = torch.from_numpy(rows[is_node]).to(device)
        node_roots = torch.from_numpy(roots[requests[is_node]]).to(device)
        parents = draft.parents.to(torch.int64)
        parent_rows = torch.where(parents < 0, node_roots, node_roots + 1 + parents)
        if draft.is_chain:
            depths = torch.from_numpy(rows - roots[requests]).to(device)
            up = torch.from_numpy(np.where(is_node, rows - 1, rows)).to(device)
            return cls(row_requests, depths, up, root_rows, node_rows, parent_rows, parents > DEAD)

        alive = torch.ones(len(rows), dtype=torch.bool, device=device)
        alive[node_rows] = parents != DEAD
        depths = torch.zeros(len(rows), dtype=torch.int64, device=device)
        for _ in range(draft.max_depth):  # a level of the trees settles with each pass
            alive[node_rows] &= alive[parent_rows]
            depths[node_rows] = torch.where(alive[node_rows], depths[parent_rows] + 1, 0)
        is_alive = alive[node_rows]
        up = torch.from_numpy(rows).to(device)
        up[node_rows] = torch.where(is_alive, parent_rows, node_rows)
        return cls(row_requests, depths, up, root_rows, node_rows, parent_rows, is_alive)
