"""Trees grown a level at a time: the levels, where their nodes lie in a draft's cache, and the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from attrs import frozen
from torch.nn.functional import pad

from specdec_core.proposer import LayerAttention
from specdec_core.types import Draft, KVMetadata, ProposerBatch, Visibility


@frozen(eq=False)
class Level:
    """Nodes of one depth, to be forwarded by the draft: request by request, in the order of their slots.

    A request's nodes of all levels have numbers in a row, and so have those of each level: they are slots of the
    draft's cache, counted from the first that is the nodes'.
    """

    requests: torch.Tensor  # int64 [n]   index into the batch
    rows: torch.Tensor  # int64 [n]   of the logits that the level was grown from: each node's parent
    token_ids: torch.Tensor  # int64 [n]
    ancestors: torch.Tensor  # int64 [n, depth]   numbers of the nodes from depth 1 to the node itself
    starts: tuple[int, ...]  # [batch]   number of each request's first node here
    counts: tuple[int, ...]  # [batch]
    is_chain: bool  # every node's ancestors are all nodes before it

    @property
    def depth(self) -> int:
        return self.ancestors.shape[1]


class TreeGrower(Protocol):
    """Decides, from the draft's logits, which nodes there are."""

    def grow(self, logits: torch.Tensor) -> Level | None:
        """The next level below the last one, or below the roots at first: logits [n, draft_vocab], a row for each of
        their nodes. None where nothing more is to be forwarded: the last level's nodes are the deepest."""
        ...

    def build(self) -> Draft: ...


def grow(grower: TreeGrower, logits: torch.Tensor, forward: Callable[[Level], torch.Tensor]) -> Draft:
    """The draft: logits [batch, draft_vocab] at the roots; forward(level) -> those at the nodes of a level."""
    level = grower.grow(logits)
    while level is not None:
        level = grower.grow(forward(level))
    return grower.build()


@frozen(eq=False)
class NodePass:
    """A pass of a draft's layers over a level: everything padded as its attention wants it.

    A node sees the slots below the first of the nodes', its ancestors' and its own.
    """

    metadata: KVMetadata
    visibility: Visibility
    token_ids: torch.Tensor  # int64 [num_padded]
    num_nodes: int

    @classmethod
    def of(cls, level: Level, batch: ProposerBatch, attention: LayerAttention, first_slots: list[int]) -> NodePass:
        """first_slots: where each request's nodes begin. A node of depth 1 stands at that position."""
        starts = [first + start for first, start in zip(first_slots, level.starts, strict=True)]
        metadata = attention.metadata(batch.requests, starts, level.counts)
        num_nodes = len(level.token_ids)
        num_more = attention.padded(num_nodes) - num_nodes
        first = torch.tensor(first_slots, device=level.requests.device)[level.requests]
        positions = pad(first + level.depth - 1, (0, num_more))
        if level.is_chain:
            visibility = Visibility(positions, pad(first + level.depth, (0, num_more)))
        else:
            slots = first.unsqueeze(1) + level.ancestors.flip(1)
            visibility = Visibility(positions, pad(first, (0, num_more)), pad(slots, (0, 0, 0, num_more)))
        return cls(metadata, visibility, pad(level.token_ids, (0, num_more)), num_nodes)

    @property
    def positions(self) -> torch.Tensor:
        """int64 [num_padded]."""
        return self.visibility.positions
