"""Grows draft trees with a fixed shape."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from specdec_core.config.draft_options import GREEDY
from specdec_core.config.token_tree import TokenTree
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import LevelBudget, ProposerBatch
from specdec_core.drafting.builder import DraftBuilder, Grown
from specdec_core.drafting.chain import HostChain
from specdec_core.drafting.device_tree import DeviceTree
from specdec_core.drafting.distributions import Distributions
from specdec_core.drafting.level import Level, TreeGrower, may_shrink, on_host
from specdec_core.ops.upload import upload


def grower_of(
    batch: ProposerBatch,
    shape: TokenTree,
    method: str = GREEDY,
    q_to_target: torch.Tensor | None = None,
    *,
    min_prob: float = 0.0,
) -> TreeGrower:
    """Begin drafts of a fixed shape: chains, or trees as of `StaticTree`, which takes the same arguments.

    min_prob: in a chain, a request whose tokens are chosen gets no more once the probability of its chain is lower than
        this.
    """
    if not may_shrink(batch.root_token_ids.device):
        return DeviceTree(batch, shape, Distributions(batch, method, q_to_target), min_prob)
    if shape.is_chain:
        return HostChain(batch, shape.depth, Distributions(batch, method, q_to_target), min_prob)
    return StaticTree(batch, shape, method, q_to_target)


class _Entries(NamedTuple):
    """The input of the forward pass over one level: its draft tokens (nodes), possibly with padding among them."""

    rows: torch.Tensor  # int64 [n]   the parent's, among the entries of the level above
    token_ids: torch.Tensor  # int64 [n]
    requests: torch.Tensor  # int64 [n]   ascending
    numbers: torch.Tensor  # int64 [n]   within the request
    kinds: torch.Tensor  # int64 [n]   index of the node in the shape, plus 1; 0: the root
    ancestors: torch.Tensor  # int64 [n, depth]   numbers, its own last


class StaticTree:
    """Grows a tree of the same shape for every request on a CPU, level by level: of the shape's nodes, the first
    max_draft_tokens by `TokenTree.order`. A request that `batch.levels` stops gets no more nodes.

    method: "greedy", "probabilistic" or "auto": see `DraftBuilder`.
    q_to_target: int64 [draft_vocab] or [batch, draft_vocab], maps draft token ids to target token ids, for all requests
        or for each; None if they are the same.
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
        self._levels = batch.levels
        # [batch, 1 + num_nodes]: root first, then nodes.
        self._num_children = upload(np.array([*map(shape.num_children_kept, batch.max_draft_tokens)]), device)
        self._first_child = upload(shape.first_children, device)
        self._leaf = len(shape.paths)  # the kind of the last node, which has no children
        size = len(batch.max_draft_tokens)
        # Of the level that is to have children, at first the roots:
        self._width, self._active = 1, np.arange(size)  # see `Level.width` and `Level.requests`
        roots = upload(self._active, device)
        zeros = torch.zeros_like(roots)
        self._above = _Entries(zeros, zeros, roots, zeros - 1, zeros, zeros.new_empty(len(roots), 0))
        self._is_node: np.ndarray | None = None  # bool [n]   entries that are no padding; None: all
        self._totals = np.zeros(size, dtype=np.int64)  # [batch]   nodes that were forwarded

    def grow(self, logits: torch.Tensor) -> Level | None:
        above = self._above
        wanted = self._num_children[above.requests, above.kinds]
        grown = self._builder.grow(logits, above.requests, above.numbers, wanted)
        rows = grown.parents
        if not len(rows):
            return None
        rank = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)  # among its siblings
        nodes = _Entries(
            rows=rows,
            token_ids=grown.token_ids,
            requests=above.requests[rows],
            numbers=grown.nodes,
            kinds=self._first_child[above.kinds[rows]] + rank,
            ancestors=torch.cat([above.ancestors[rows], grown.nodes.unsqueeze(1)], dim=1),
        )
        if nodes.ancestors.shape[1] == self._shape.depth or not bool((self._builder.room > 0).any()):
            return None
        if self._levels is not None:
            goes = self._goes_on(self._levels, grown, nodes, rank == 0)
            if not goes.any():
                return None
            if not goes.all():
                is_kept = torch.from_numpy(goes)
                nodes = _Entries(*(each[is_kept] for each in nodes))
        return self._level(nodes)

    def build(self) -> Draft:
        return self._builder.build()

    def _level(self, nodes: _Entries) -> Level:
        """Return these nodes as a `Level`, the input of the next forward pass, padded if requests have different
        numbers of nodes."""
        starts = self._totals
        of = on_host(nodes.requests)
        counts = np.bincount(of, minlength=len(starts))
        self._totals = starts + counts
        active, width = np.flatnonzero(counts), int(counts.max())
        is_alive = self._is_node = None
        if len(of) < len(active) * width:
            places = np.searchsorted(active, of) * width + np.arange(len(of)) - np.searchsorted(of, of)
            nodes = self._with_dead(nodes, places, active, (starts[active][:, None] + np.arange(width)).ravel())
            alive = np.zeros(len(active) * width, dtype=bool)
            alive[places] = True
            is_alive, self._is_node = upload(alive, nodes.rows.device), alive
        self._above, self._active, self._width = nodes, active, width
        return Level(
            width=width,
            requests=active,
            rows=nodes.rows,
            token_ids=nodes.token_ids,
            ancestors=nodes.ancestors,
            starts=tuple(starts.tolist()),
            is_chain=False,
            is_alive=is_alive,
        )

    def _with_dead(self, nodes: _Entries, places: np.ndarray, active: np.ndarray, numbers: np.ndarray) -> _Entries:
        """Pad each request's nodes to the same number of entries with dead nodes.

        places: int64 [n], index of each node among all entries.
        active: int64, indices of the requests in this level.
        numbers: int64 [num_entries], KV-cache slot of each entry, counted from the slot of the request's first draft
            token.
        """
        device, width = nodes.rows.device, len(numbers) // len(active)
        first_above = np.searchsorted(self._active, active) * self._width
        own = upload(numbers, device)
        dead = _Entries(
            rows=upload(first_above.repeat(width), device),
            token_ids=torch.zeros_like(own),
            requests=upload(active.repeat(width), device),
            numbers=own.clone(),
            kinds=torch.full_like(own, self._leaf),
            ancestors=own.unsqueeze(1).repeat(1, nodes.ancestors.shape[1]),
        )
        where = upload(places, device)
        return _Entries(*(other.index_copy_(0, where, node) for other, node in zip(dead, nodes, strict=True)))

    def _goes_on(self, levels: LevelBudget, grown: Grown, nodes: _Entries, is_first: torch.Tensor) -> np.ndarray:
        """bool [n]   whether the request of each node gets another level. is_first: bool [n], whether a node is its
        parent's first child."""
        room, requests = self._builder.room, on_host(nodes.requests)
        wanted = self._num_children[nodes.requests, nodes.kinds]
        num_nodes = torch.zeros_like(room).index_add_(0, nodes.requests, wanted)
        is_first_draw = is_first & self._builder.is_sampled[nodes.requests]
        rows = on_host(grown.parents)
        rows = rows if self._is_node is None else (self._is_node.cumsum() - 1)[rows]
        others = map(on_host, (grown.scores, is_first_draw, torch.minimum(num_nodes, room)))
        return levels.goes_on(requests, rows, *others).take(requests)
