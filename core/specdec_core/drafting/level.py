"""Trees grown a level at a time: the levels, where their nodes lie in a draft's cache, and the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from attrs import frozen

from specdec_core.ops.padding import padded_to
from specdec_core.proposer import LayerAttention
from specdec_core.types import Draft, KVMetadata, ProposerBatch, RequestView, Visibility


@frozen(eq=False)
class Level:
    """Nodes of one depth, to be forwarded by the draft: request by request, in the order of their slots.

    A request's nodes of all levels have numbers in a row, and so have those of each level: they are slots of the
    draft's cache, counted from the first that is the nodes'.
    """

    rows: torch.Tensor  # int64 [n]   of the logits that the level was grown from: each node's parent
    token_ids: torch.Tensor  # int64 [n]
    requests: np.ndarray  # int64 [n]   index into the batch
    ancestors: np.ndarray  # int64 [n, depth]   numbers of the nodes from depth 1 to the node itself
    starts: tuple[int, ...]  # [batch]   number of each request's first node here
    counts: tuple[int, ...]  # [batch]
    is_chain: bool  # every node's ancestors are all nodes before it

    @property
    def depth(self) -> int:
        return int(self.ancestors.shape[1])


class TreeGrower(Protocol):
    """Decides, from the draft's logits, which nodes there are."""

    @property
    def roots(self) -> Sequence[int]:
        """The requests that are to have a draft, as indices into the batch, ascending."""
        ...

    def grow(self, logits: torch.Tensor) -> Level | None:
        """The next level below the last one, or below `roots` at first: logits [n, draft_vocab], a row for each of
        their nodes. None where nothing more is to be forwarded: the last level's nodes are the deepest."""
        ...

    def build(self) -> Draft: ...


def grow(grower: TreeGrower, logits: torch.Tensor, forward: Callable[[Level], torch.Tensor]) -> Draft:
    """The draft: logits [n, draft_vocab] at `grower.roots`; forward(level) -> those at the nodes of a level."""
    level = grower.grow(logits)
    while level is not None:
        level = grower.grow(forward(level))
    return grower.build()


@frozen(eq=False)
class DraftPass:
    """A pass of a draft's layers, padded as its attention wants it: of tokens that are known, or of a level."""

    metadata: KVMetadata
    visibility: Visibility
    token_ids: torch.Tensor  # int64 [num_padded]
    num_tokens: int

    @property
    def positions(self) -> torch.Tensor:
        """int64 [num_padded]."""
        return self.visibility.positions

    @classmethod
    def over_tokens(
        cls,
        attention: LayerAttention,
        requests: Sequence[RequestView],
        starts: Sequence[int],
        lengths: Sequence[int],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> DraftPass:
        """Slots [start, start + length) of each request; every token sees those up to its own. token_ids and positions:
        int64 [sum of lengths]."""
        metadata = attention.metadata(requests, starts, lengths)
        num_padded = attention.padded(len(token_ids))
        padded = padded_to(num_padded, positions)
        return cls(metadata, Visibility(padded, padded + 1), padded_to(num_padded, token_ids), len(token_ids))

    @classmethod
    def over_level(
        cls, attention: LayerAttention, batch: ProposerBatch, first_slots: Sequence[int], level: Level
    ) -> DraftPass:
        """Nodes see the slots below the first of the nodes', their ancestors' and their own. first_slots: where each
        request's nodes begin. A node of depth 1 stands at that position."""
        starts = [first + start for first, start in zip(first_slots, level.starts, strict=True)]
        metadata = attention.metadata(batch.requests, starts, level.counts)
        num_nodes = len(level.requests)
        num_padded = attention.padded(num_nodes)
        first = np.array(first_slots)[level.requests]

        def padded(array: np.ndarray) -> torch.Tensor:
            whole = np.zeros((num_padded, *array.shape[1:]), dtype=np.int64)
            whole[:num_nodes] = array
            return torch.from_numpy(whole).to(level.token_ids.device)

        positions = padded(first + level.depth - 1)
        if level.is_chain:
            visibility = Visibility(positions, padded(first + level.depth))
        else:
            visibility = Visibility(positions, padded(first), padded(first[:, None] + level.ancestors[:, ::-1]))
        return cls(metadata, visibility, padded_to(num_padded, level.token_ids), num_nodes)
