"""The forward passes of a draft model or head: their tokens, their slots in its KV cache, and their attention mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen

from specdec_core.contracts.kv import KVMetadata, Visibility
from specdec_core.contracts.proposer import LayerAttention, ProposerBatch, RequestView
from specdec_core.drafting.level import Level
from specdec_core.ops.upload import upload


class DraftSlots:
    """The slots of a draft's tokens in the draft model's KV cache, for all levels of one call of `propose`.

    first_slots: [batch], the KV-cache slot of each request's first draft token, which is also its position.
    """

    def __init__(self, attention: LayerAttention, batch: ProposerBatch, first_slots: Sequence[int]) -> None:
        self.attention, self.requests, self.first = attention, batch.requests, np.array(first_slots)
        self._num_levels = min(batch.max_draft_tokens) - 1  # of chains, that have a token of every request
        # Of chains: one row for each level, and the metadata of all levels together.
        self._chain: tuple[KVMetadata, torch.Tensor, torch.Tensor] | None = None

    def hold_whole_level(self, level: Level) -> bool:
        """Whether the level is one of chains and has a token of every request, so that `of_chain` has its slots."""
        is_whole = level.is_chain and level.is_alive is None and len(level.requests) == len(self.first)
        return is_whole and level.depth <= self._num_levels

    def of_chain(self, depth: int) -> tuple[KVMetadata, Visibility]:
        """Return the slots and the mask of a level. Those of all levels are computed in the first call, since a level
        has few tokens, and takes longer on the host than on the device."""
        if self._chain is None:
            num_levels = self._num_levels
            lengths = [num_levels] * len(self.first)
            metadata = self.attention.metadata(self.requests, self.first.tolist(), lengths)
            positions = torch.from_numpy(self.first + np.arange(num_levels + 1)[:, None])
            slots = metadata.slot_mapping.view(-1, num_levels).T.contiguous()
            self._chain = metadata, slots, upload(positions, slots.device)
        metadata, slots, positions = self._chain
        starts = tuple((self.first + (depth - 1)).tolist())
        of_level = KVMetadata(
            starts=starts,
            lengths=(1,) * len(starts),
            block_tables=metadata.block_tables,
            slot_mapping=slots[depth - 1],
            block_size=metadata.block_size,
        )
        return of_level, Visibility(positions[depth - 1], positions[depth])


@frozen(eq=False)
class DraftPass:
    """The inputs of one forward pass of a draft model or head. Its tokens are known tokens or a level of draft
    tokens."""

    metadata: KVMetadata
    visibility: Visibility
    token_ids: torch.Tensor  # int64 [num_tokens]

    @property
    def positions(self) -> torch.Tensor:
        """int64 [num_tokens]   the position of each token in its request."""
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
        """Prepare a causal forward pass over the KV-cache slots [start, start + length) of each request. token_ids,
        positions: int64 [sum of lengths]."""
        return cls(attention.metadata(requests, starts, lengths), Visibility(positions, positions + 1), token_ids)

    @classmethod
    def over_level(cls, slots: DraftSlots, level: Level) -> DraftPass:
        """Prepare a forward pass with tree attention over a level: each draft token attends to the slots before the
        request's draft tokens, to its ancestors and to itself."""
        if slots.hold_whole_level(level):
            return cls(*slots.of_chain(level.depth), level.token_ids)
        first_slots = slots.first
        lengths = np.zeros_like(first_slots)
        lengths[level.requests] = level.width
        starts = first_slots + np.array(level.starts)
        metadata = slots.attention.metadata(slots.requests, starts.tolist(), lengths.tolist())
        first = upload(first_slots[level.requests].repeat(level.width), level.token_ids.device)
        positions, prefix_lens, more_slots = first + (level.depth - 1), first + level.depth, None
        if level.is_alive is not None:  # at its depth, a dead entry could be past the last position
            positions = torch.where(level.is_alive, positions, first)
        if not level.is_chain:
            prefix_lens, more_slots = first, first.unsqueeze(1) + level.ancestors.flip(1)
        visibility = Visibility(positions, prefix_lens, more_slots, num_tree_slots=max(level.starts) + level.width)
        return cls(metadata, visibility, level.token_ids)
