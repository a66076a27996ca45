"""Who sees whom in one pass: computed once, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen

from specdec_core.ops.padding import Padding, round_up
from specdec_core.types import KVMetadata, Visibility

SHORT = 64
"""Requests with at most this many tokens in the pass share rectangles; longer ones (prefill) stand alone."""


@frozen(eq=False)
class Segment:
    """Some requests of the pass, as a rectangle of query rows and keys. Padding repeats a request's last token and
    reads its last slot, never another request's: masked or not, NaN spreads through a product."""

    token_rows: torch.Tensor  # int64 [batch, num_rows]   the query's row in the flat batch
    key_slots: torch.Tensor  # int64 [batch, num_keys]
    is_visible: torch.Tensor  # bool [batch, num_rows, num_keys]
    query_positions: torch.Tensor  # int64 [batch, num_rows]
    key_positions: torch.Tensor  # int64 [batch, num_keys]
    valid_rows: torch.Tensor  # int64 [n]   rows of the flattened rectangle that are no padding
    valid_tokens: torch.Tensor  # int64 [n]   the flat batch's row of each
    is_whole: bool  # the rectangle is the flat batch itself, padding included
    _masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = field(factory=dict)

    def mask(self, groups: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive [batch, 1, groups * num_rows, num_keys], made once per pass, window and dtype."""
        key = groups, window, dtype
        if key not in self._masks:
            is_visible = self.is_visible
            if window is not None:
                is_near = self.key_positions.unsqueeze(1) > self.query_positions.unsqueeze(2) - window
                is_visible = is_visible & is_near
            mask = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
            self._masks[key] = mask.masked_fill_(~is_visible, -torch.inf).unsqueeze(1).repeat(1, 1, groups, 1)
        return self._masks[key]


@frozen(eq=False)
class AttentionPlan:
    """One pass: where its tokens lie and what each sees. An implementation takes from it what it needs; what has to be
    computed is computed once, for all layers."""

    metadata: KVMetadata
    visibility: Visibility  # of the whole flat batch, padding included
    padding: Padding  # of query rows and keys
    memo: dict[str, Any] = field(factory=dict)
    """For implementations: what they computed for this pass, under a name of their own."""

    def of_rows(self, rows: Sequence[int]) -> AttentionPlan:
        """The same pass for one query of each request, at these rows of the flat batch; any more are padding."""
        metadata, seen = self.metadata, self.visibility
        index, batch = torch.tensor(rows, device=seen.positions.device), len(metadata.lengths)
        first_rows = np.cumsum(metadata.lengths) - metadata.lengths
        return AttentionPlan(
            evolve(
                metadata,
                starts=tuple((np.array(metadata.starts) + rows[:batch] - first_rows).tolist()),
                lengths=(1,) * batch,
                slot_mapping=metadata.slot_mapping.index_select(0, index[:batch]),
            ),
            Visibility(
                seen.positions.index_select(0, index),
                seen.prefix_lens.index_select(0, index),
                None if seen.more_slots is None else seen.more_slots.index_select(0, index),
            ),
            self.padding,
        )

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All requests, as rectangles: those of similar context length together, each padded to the longest."""
        starts, lengths = self.metadata.starts, self.metadata.lengths
        rectangles: dict[int, list[int]] = {}
        for request, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            if 0 < length <= SHORT:
                rectangles.setdefault(round_up(start + length, self.padding.keys).bit_length(), []).append(request)
        return (*(_segment(np.array(requests), self) for requests in rectangles.values()), *self.long_segments)

    @cached_property
    def long_segments(self) -> tuple[Segment, ...]:
        """The requests with more than SHORT tokens in the pass, each alone."""
        return tuple(
            _segment(np.array([request]), self) for request, n in enumerate(self.metadata.lengths) if n > SHORT
        )


def _segment(requests: np.ndarray, plan: AttentionPlan) -> Segment:
    metadata, visibility, padding = plan.metadata, plan.visibility, plan.padding
    num_padded_tokens = len(visibility.positions)
    device = metadata.block_tables.device
    lengths = np.asarray(metadata.lengths)
    first_tokens = (np.cumsum(lengths) - lengths)[requests]
    lengths, starts = lengths[requests], np.asarray(metadata.starts)[requests]
    num_rows = round_up(int(lengths.max()), padding.rows)
    num_keys = round_up(int((starts + lengths).max()), padding.keys)

    row = np.minimum(np.arange(num_rows), lengths[:, None] - 1)
    token_rows = torch.from_numpy(first_tokens[:, None] + row).to(device)
    positions = visibility.positions[token_rows]
    key_positions = torch.arange(num_keys, device=device).repeat(len(requests), 1)
    key_positions.scatter_(1, torch.from_numpy(starts[:, None] + row).to(device), positions)
    is_visible = torch.arange(num_keys, device=device) < visibility.prefix_lens[token_rows].unsqueeze(2)
    if visibility.more_slots is not None:
        is_visible.scatter_(2, visibility.more_slots[token_rows], True)

    local = torch.from_numpy(np.minimum(np.arange(num_keys), (starts + lengths - 1)[:, None])).to(device)
    blocks = metadata.block_tables[torch.from_numpy(requests).to(device)].gather(1, local // metadata.block_size)
    valid_rows = np.flatnonzero(np.arange(num_rows) < lengths[:, None])
    return Segment(
        token_rows=token_rows,
        key_slots=blocks * metadata.block_size + local % metadata.block_size,
        is_visible=is_visible,
        query_positions=positions,
        key_positions=key_positions,
        valid_rows=torch.from_numpy(valid_rows).to(device),
        valid_tokens=token_rows.flatten()[torch.from_numpy(valid_rows).to(device)],
        is_whole=len(requests) == len(metadata.lengths)
        and token_rows.numel() == num_padded_tokens
        and (len(requests) == 1 or len(valid_rows) == num_padded_tokens),
    )
