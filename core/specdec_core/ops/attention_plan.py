"""Who sees whom in one pass: computed once, used by every layer."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from attrs import field, frozen

from specdec_core.ops.padding import Padding, round_up
from specdec_core.types import KVMetadata

SHORT = 64
"""Requests with at most this many tokens in the pass share rectangles; longer ones (prefill) stand alone."""


@frozen(eq=False)
class Visibility:
    """Which slots of its own request each token of a pass sees: a prefix, and single ones beyond it (a tree's nodes see
    their ancestors). Positions are what windows are measured in."""

    positions: torch.Tensor  # int64 [num_tokens]
    prefix_lens: torch.Tensor  # int64 [num_tokens]   the slots [0, prefix_len)
    more_slots: torch.Tensor | None = None  # int64 [num_tokens, n]   may repeat each other


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
    segments: tuple[Segment, ...]


def plan_attention(
    metadata: KVMetadata, visibility: Visibility, num_padded_tokens: int, padding: Padding
) -> AttentionPlan:
    """num_padded_tokens: the length of the flat batch. padding: of query rows and keys."""
    num_keys = [round_up(start + n, padding.keys) for start, n in zip(metadata.starts, metadata.lengths, strict=True)]
    alone = itertools.count(1)
    rectangles: dict[int, list[int]] = {}  # contexts of similar length together: each is padded to the longest
    for request, length in enumerate(metadata.lengths):
        rectangle = num_keys[request].bit_length() if length <= SHORT else -next(alone)
        rectangles.setdefault(rectangle, []).append(request)
    return AttentionPlan(
        tuple(
            _segment(np.array(requests), metadata, visibility, num_padded_tokens, padding)
            for requests in rectangles.values()
        )
    )


def _segment(
    requests: np.ndarray, metadata: KVMetadata, visibility: Visibility, num_padded_tokens: int, padding: Padding
) -> Segment:
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
