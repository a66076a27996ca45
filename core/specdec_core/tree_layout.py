"""Where each node of a draft stands: its row among the target's logits, its depth, its ancestors."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import torch
from attrs import fields, frozen

from specdec_core.types import DEAD, Draft

Array = TypeVar("Array", np.ndarray, torch.Tensor)


@frozen(eq=False)
class TreeLayout(Generic[Array]):
    """A draft's trees over the rows of target logits, as arrays on the host or as tensors.

    Walking `up` from a row ends at the request's root, or stays where it is at a root and at a dead node: a dead node,
    and all below one, has depth 0 (the root's position) and sees only itself.
    """

    row_requests: Array  # int64 [num_rows]
    row_depths: Array  # int64 [num_rows]   0 at roots and dead nodes
    up: Array  # int64 [num_rows]   row of the parent
    root_rows: Array  # int64 [batch]
    node_rows: Array  # int64 [num_nodes]
    parent_rows: Array  # int64 [num_nodes]   the root's row for a dead node
    is_alive: Array  # bool [num_nodes]

    @staticmethod
    def of(draft: Draft) -> TreeLayout[np.ndarray]:
        """On the host."""
        requests = np.arange(draft.batch_size)
        offsets = np.array(draft.offsets)
        row_requests = requests.repeat(np.diff(offsets) + 1)
        root_rows = offsets[:-1] + requests
        rows = np.arange(len(row_requests))
        row_roots = root_rows[row_requests]
        node_rows = (rows != row_roots).nonzero()[0]
        node_roots = row_roots[node_rows]
        parents = draft.parents.cpu().numpy()
        parent_rows = np.where(parents < 0, node_roots, node_roots + 1 + parents)
        is_alive = parents != DEAD
        up = rows.copy()
        up[node_rows] = parent_rows
        if draft.is_chain:
            return TreeLayout(row_requests, rows - row_roots, up, root_rows, node_rows, parent_rows, is_alive)
        depths = np.zeros(len(rows), dtype=np.int64)
        for _ in range(draft.max_depth):  # a level of the trees settles with each pass
            depths[node_rows] = depths[parent_rows] + 1
        if not is_alive.all():
            alive = np.ones(len(rows), dtype=bool)
            alive[node_rows] = is_alive
            while (hangs := is_alive & ~alive[parent_rows]).any():  # from a dead node
                is_alive &= ~hangs
                alive[node_rows] = is_alive
            depths[~alive], up[~alive] = 0, rows[~alive]
        return TreeLayout(row_requests, depths, up, root_rows, node_rows, parent_rows, is_alive)

    def to(self: TreeLayout[np.ndarray], device: torch.device) -> TreeLayout[torch.Tensor]:
        return TreeLayout(*(torch.from_numpy(getattr(self, each.name)).to(device) for each in fields(TreeLayout)))
