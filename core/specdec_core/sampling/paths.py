"""The draft tokens that stand before each row of target logits."""

from __future__ import annotations

from functools import cached_property

import torch
from attrs import frozen

from specdec_core.contracts.draft import Draft


@frozen(eq=False)
class Paths:
    """The nodes from each row's own up to the one below its root."""

    draft: Draft

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """int64 [num_rows, max_depth]   a node's token, its parent's, and so on; -1 past the root. None at dead nodes
        and those below: only -1."""
        layout = self.draft.layout
        own = torch.full_like(layout.up, -1)
        own[layout.node_rows] = self.draft.token_ids.masked_fill(~layout.is_alive, -1)
        rows = torch.arange(len(own), device=own.device)
        path = torch.empty((len(own), self.draft.max_depth), dtype=torch.int64, device=own.device)
        for depth in range(self.draft.max_depth):
            path[:, depth] = own[rows]
            rows = layout.up[rows]
        return path
