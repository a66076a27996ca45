"""Who sees whom in one pass: computed once, used by every layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from attrs import field, frozen

from specdec_core.ops.padding import Padding, round_up
from specdec_core.types import Draft, KVMetadata

SHORT = 64
"""Requests with at most this many tokens in the pass share rectangles; longer ones (prefill) stand alone."""


@frozen(eq=False)
class Segment:
    """Some requests of the pass, as a rectangle of query rows and key slots, padded."""

    token_rows: torch.Tensor  # int64 [batch, num_rows]   the query's row in the flat batch; padding: 0
    key_slots: torch.Tensor  # int64 [batch, num_keys]
    is_visible: torch.Tensor  # bool [batch, num_rows, num_keys]   padding rows see the first key
    valid_rows: torch.Tensor  # int64 [n]   rows of the flattened rectangle that are no padding
    valid_tokens: torch.Tensor  # int64 [n]   the flat batch's row of each
    is_whole: bool  # the rectangle is the flat batch itself, padding included
    _masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(factory=dict)

    def mask(self, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive [batch, 1, groups * num_rows, num_keys], made once per pass and dtype."""
        if (groups, dtype) not in self._masks:
            batch, num_rows, num_keys = self.is_visible.shape
            mask = torch.zeros(batch, 1, num_rows, num_keys, dtype=dtype, device=self.is_visible.device)
            mask.masked_fill_(~self.is_visible.unsqueeze(1), -torch.inf)
            self._masks[groups, dtype] = mask.repeat(1, 1, groups, 1)
        return self._masks[groups, dtype]


@frozen(eq=False)
class AttentionPlan:
    segments: tuple[Segment, ...]


def plan_attention(
    metadata: KVMetadata, num_known: Sequence[int], draft: Draft, num_padded_tokens: int, padding: Padding
) -> AttentionPlan:
    """metadata covers, for each request, num_known tokens and then its draft nodes.

    A known token sees every slot up to its own; a node sees those up to the root's, its ancestors and itself; a dead
    node sees itself. num_padded_tokens: the length of the flat batch. padding: of query rows and keys.
    """
    lengths = np.asarray(metadata.lengths)
    num_keys = [round_up(end, padding.keys) for end in (np.asarray(metadata.starts) + lengths).tolist()]
    alone = itertools.count(1)
    rectangles: dict[int, list[int]] = {}  # contexts of similar length together: each is padded to the longest
    for request, length in enumerate(lengths):
        rectangle = num_keys[request].bit_length() if length <= SHORT else -next(alone)
        rectangles.setdefault(rectangle, []).append(request)
    parts = [np.array(requests) for requests in rectangles.values()]
    return AttentionPlan(
        tuple(_segment(part, metadata, np.asarray(num_known), draft, num_padded_tokens, padding) for part in parts)
    )


def _segment(
    part: np.ndarray,
    metadata: KVMetadata,
    num_known: np.ndarray,
    draft: Draft,
    num_padded_tokens: int,
    padding: Padding,
) -> Segment:
    device = metadata.block_tables.device
    lengths, starts = np.asarray(metadata.lengths), np.asarray(metadata.starts)[part]
    first_token = (np.cumsum(lengths) - lengths)[part]
    lengths, num_known = lengths[part], num_known[part]
    num_rows = round_up(int(lengths.max()), padding.rows)
    num_keys = round_up(int((starts + lengths).max()), padding.keys)

    row = np.arange(num_rows)
    is_valid = row < lengths[:, None]
    token_rows = np.where(is_valid, first_token[:, None] + row, 0)
    sees_up_to = starts[:, None] + (row if draft.is_chain else np.minimum(row, num_known[:, None] - 1))
    is_visible = torch.from_numpy(np.arange(num_keys) <= np.where(is_valid, sees_up_to, 0)[:, :, None]).to(device)
    if draft.num_nodes and not draft.is_chain:
        _show_ancestors(is_visible, part, starts, num_known, draft)

    # Padding reads the request's own last slot, never another request's: masked or not, NaN spreads through a product.
    local = torch.from_numpy(np.minimum(np.arange(num_keys), (starts + lengths - 1)[:, None])).to(device)
    blocks = metadata.block_tables[torch.from_numpy(part).to(device)].gather(1, local // metadata.block_size)
    key_slots = blocks * metadata.block_size + local % metadata.block_size
    valid_rows = np.flatnonzero(is_valid)
    return Segment(
        token_rows=torch.from_numpy(token_rows).to(device),
        key_slots=key_slots,
        is_visible=is_visible,
        valid_rows=torch.from_numpy(valid_rows).to(device),
        valid_tokens=torch.from_numpy(token_rows.ravel()[valid_rows]).to(device),
        is_whole=len(part) == len(metadata.lengths)
        and token_rows.size == num_padded_tokens
        and (len(part) == 1 or len(valid_rows) == num_padded_tokens),
    )


def _show_ancestors(
    is_visible: torch.Tensor, part: np.ndarray, starts: np.ndarray, num_known: np.ndarray, draft: Draft
) -> None:
    """Let each node see itself and the nodes above it; take the rest of the request from a dead one."""
    device = is_visible.device
    layout = draft.layout
    index_in_part = np.full(draft.batch_size, -1)
    index_in_part[part] = np.arange(len(part))
    node_requests = np.repeat(np.arange(draft.batch_size), np.diff(draft.offsets))
    here = np.flatnonzero(index_in_part[node_requests] >= 0)
    segment_row = index_in_part[node_requests[here]]  # which request of the segment each node belongs to

    nodes = torch.from_numpy(here).to(device)
    request = torch.from_numpy(segment_row).to(device)
    rows = layout.node_rows[nodes]
    roots = layout.root_rows[layout.row_requests[rows]]
    query_row = rows - roots + torch.from_numpy(num_known[segment_row] - 1).to(device)
    root_slot = torch.from_numpy((starts + num_known - 1)[segment_row]).to(device)

    is_dead = ~layout.is_alive[nodes]
    is_visible[request, query_row] &= ~is_dead.unsqueeze(1)
    seen = rows
    for _ in range(draft.max_depth):  # a walk from a node to its root; it stops early at a dead one
        is_visible[request, query_row, root_slot + (seen - roots)] = True
        seen = layout.up[seen]
