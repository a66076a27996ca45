"""Trees whose shape is known before anything is drafted, chains among them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec_core.config import GREEDY
from specdec_core.drafting.builder import DraftBuilder, Grown
from specdec_core.drafting.drafted import on_host
from specdec_core.drafting.level import Level
from specdec_core.drafting.stop import Stopping
from specdec_core.token_tree import TokenTree
from specdec_core.types import Draft, ProposerBatch


class StaticTree:
    """Grows one shape for every request, cut where the budget ends: its nodes come level by level.

    method and q_to_target: see `DraftBuilder`. stopping: what `DraftStop.begin` returned: a request that is stopped has
    no more nodes.
    """

    def __init__(
        self,
        batch: ProposerBatch,
        shape: TokenTree,
        method: str = GREEDY,
        q_to_target: torch.Tensor | None = None,
        stopping: Stopping | None = None,
    ) -> None:
        self._builder = DraftBuilder(batch, method, q_to_target)
        self._shape, self._stopping = shape, stopping
        device = batch.root_token_ids.device
        self._num_children = torch.tensor(shape.num_children, device=device)  # of the root, then of each node
        self._first_child = torch.tensor(shape.first_children, device=device)
        size = len(batch.max_draft_tokens)
        self._roots = range(size) if stopping is None else stopping.drafting
        # Of the level that is to have children:
        self._requests = torch.tensor(self._roots, dtype=torch.int64, device=device)
        self._nodes = torch.full_like(self._requests, -1)
        self._kinds = torch.zeros_like(self._requests)  # which part of the shape a node is
        self._ancestors = self._requests.new_empty(len(self._roots), 0)
        self._totals = [0] * size  # nodes of each request so far

    @property
    def roots(self) -> Sequence[int]:
        return self._roots

    def grow(self, logits: torch.Tensor) -> Level | None:
        grown = self._builder.grow(logits, self._requests, self._nodes, self._num_children[self._kinds])
        if not len(grown.nodes):
            return None
        rows, nodes, token_ids = grown.parents, grown.nodes, grown.token_ids
        rank = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)  # among its siblings
        self._kinds = self._first_child[self._kinds[rows]] + rank
        self._requests, self._nodes = self._requests[rows], nodes
        self._ancestors = torch.cat([self._ancestors[rows], nodes.unsqueeze(1)], dim=1)
        if self._ancestors.shape[1] == self._shape.depth or not bool((self._builder.room > 0).any()):
            return None
        if self._stopping is not None:
            goes = torch.from_numpy(self._goes_on(self._stopping, grown, rank == 0)).to(rows.device)[self._requests]
            rows, token_ids, self._requests, self._nodes, self._kinds, self._ancestors = (
                each[goes] for each in (rows, token_ids, self._requests, nodes, self._kinds, self._ancestors)
            )
            if not len(rows):
                return None
        starts, requests = tuple(self._totals), on_host(self._requests)
        counts = tuple(np.bincount(requests, minlength=len(starts)).tolist())
        self._totals = [start + count for start, count in zip(starts, counts, strict=True)]
        return Level(rows, token_ids, requests, on_host(self._ancestors), starts, counts, self._shape.is_chain)

    def build(self) -> Draft:
        draft = self._builder.build()
        return draft if self._stopping is None else self._stopping.keep(draft, in_place=True)

    def _goes_on(self, stopping: Stopping, grown: Grown, is_first: torch.Tensor) -> np.ndarray:
        """bool [batch]."""
        room = self._builder.room
        num_nodes = torch.zeros_like(room).index_add_(0, self._requests, self._num_children[self._kinds])
        is_first_draw = is_first & self._builder.is_sampled[self._requests]
        given = self._requests, grown.parents, grown.scores, is_first_draw, torch.minimum(num_nodes, room)
        return stopping.goes_on(*map(on_host, given))
