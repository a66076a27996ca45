"""Trees whose shape is known before anything is drafted, chains among them."""

from __future__ import annotations

import torch

from specdec_core.config import GREEDY
from specdec_core.drafting.builder import DraftBuilder
from specdec_core.drafting.level import Level
from specdec_core.token_tree import TokenTree
from specdec_core.types import Draft, ProposerBatch


class StaticTree:
    """Grows one shape for every request, cut where the budget ends: its nodes come level by level.

    method and q_to_target: see `DraftBuilder`.
    """

    def __init__(
        self,
        batch: ProposerBatch,
        shape: TokenTree,
        method: str = GREEDY,
        q_to_target: torch.Tensor | None = None,
    ) -> None:
        self._builder = DraftBuilder(batch, method, q_to_target)
        self._shape = shape
        device = batch.root_token_ids.device
        self._num_children = torch.tensor(shape.num_children, device=device)  # of the root, then of each node
        self._first_child = torch.tensor(shape.first_children, device=device)
        size = len(batch.max_draft_tokens)
        self._requests = torch.arange(size, device=device)  # of the level that is to have children
        self._nodes = torch.full((size,), -1, device=device)
        self._kinds = torch.zeros(size, dtype=torch.int64, device=device)  # which part of the shape a node is
        self._ancestors = torch.empty(size, 0, dtype=torch.int64, device=device)
        self._totals = [0] * size  # nodes of each request so far

    def grow(self, logits: torch.Tensor) -> Level | None:
        grown = self._builder.grow(logits, self._requests, self._nodes, self._num_children[self._kinds])
        if not len(grown.nodes):
            return None
        rows, nodes = grown.parents, grown.nodes
        rank = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)  # among its siblings
        self._kinds = self._first_child[self._kinds[rows]] + rank
        self._requests, self._nodes = self._requests[rows], nodes
        self._ancestors = torch.cat([self._ancestors[rows], nodes.unsqueeze(1)], dim=1)
        if self._ancestors.shape[1] == self._shape.depth or not bool((self._builder.room > 0).any()):
            return None
        starts = tuple(self._totals)
        counts = tuple(torch.bincount(self._requests, minlength=len(starts)).tolist())
        self._totals = [start + count for start, count in zip(starts, counts, strict=True)]
        is_chain = self._shape.is_chain
        return Level(self._requests, rows, grown.token_ids, self._ancestors, starts, counts, is_chain)

    def build(self) -> Draft:
        return self._builder.build()
