"""The attention mask and the cache addresses of one forward pass: computed once, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen

from specdec_core.contracts.kv import KVMetadata, Visibility
from specdec_core.errors import SpecdecError
from specdec_core.ops.padding import Padding, round_up
from specdec_core.ops.upload import upload

WORD = 64  # bits of an int64
SHORT = 64
"""Requests with at most this many tokens in the forward pass share a `Segment`; a longer one (prefill) has its own."""


@frozen(eq=False)
class Segment:
    """Some requests of a forward pass, computed as one batched attention: all are padded to the same number of query
    rows and of keys.

    A request is padded with its own last token and its own last KV-cache slot. A slot of another request might hold
    NaN, which spreads through the matrix product even where the slot is masked.
    """

    token_rows: torch.Tensor  # int64 [batch, num_rows]   the query's row in the flat batch
    key_slots: torch.Tensor  # int64 [batch, num_keys]
    is_visible: torch.Tensor  # bool [batch, num_rows, num_keys]
    valid_rows: torch.Tensor  # int64 [n]   rows of the flattened rectangle that are not padding
    valid_tokens: torch.Tensor  # int64 [n]   the row of the flat batch of each
    is_whole: bool  # the rectangle is the flat batch itself, padding included
    _masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = field(factory=dict)

    def mask(self, groups: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """The additive attention mask [batch, 1, groups * num_rows, num_keys], cached for each window and dtype.

        groups: number of query heads that share a key head.
        window: width of the sliding window in positions; None: no sliding window.
        """
        key = groups, window, dtype
        if key not in self._masks:
            is_visible = self.is_visible
            if window is not None:
                # Positions, not slots: a node's ancestors may lie anywhere among nodes that are masked for it.
                seen = is_visible.cumsum(-1, dtype=torch.int32)
                is_visible = is_visible & (seen > seen[..., -1:] - window)
            mask = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
            self._masks[key] = mask.masked_fill_(~is_visible, -torch.inf).unsqueeze(1).repeat(1, 1, groups, 1)
        return self._masks[key]


@frozen(eq=False)
class AttentionPlan:
    """The attention mask and the KV-cache addresses of one forward pass. Each tensor is computed when it is first read,
    once for all layers.

    Kernels that read the caches in place need six tensors, on the caches' device. These describe a forward pass
    completely, be it prefill, chains of draft tokens, tree attention or a mixture. Slots are counted within a request:

    - `token_requests`: row t of the flat batch (one token) belongs to request `b = token_requests[t]`. The rows of a
      request are consecutive, and requests are in order; a request may have no row. Padding is at the end and has
      request -1. It attends to nothing, and its output is not used but must be finite.
    - `prefix_lens`, `tree_start`, `ancestors`: row t attends to the slots `[0, prefix_lens[t])` of its request and to
      each slot `tree_start[b] + j` whose bit j is set in `ancestors[t]`: bit `j % 64` of word `j // 64`. Bit 63 is the
      sign of its word.
    - A prompt or output token, or a draft token of a chain, has no bits set, and its prefix ends with the token itself.
      A tree node (a draft token of a tree) has bits for its ancestors and itself; its prefix is `[0, tree_start[b])`,
      which ends with the root (the request's last token). A dead (padding) node attends to at least one slot of its
      request; which one is undefined. So every row except padding attends to a key.
    - `block_tables`: slot s of request b is the row `block_tables[b, s // block_size] * block_size + s % block_size` of
      the caches, with the metadata's block_size.
    - `context_lens`: all slots of request b below `context_lens[b]` have been written, and no row attends to later
      slots. Among the written slots, masked keys and values are NaN only if the request itself computed NaN. Do not
      read other rows of the caches: rows of other requests, rows of blocks in `block_tables` past a request's own, and
      the last row (slot -1), where `store_kv` writes padding.
    - Sliding windows count positions. The slots that a row attends to, in order, have the positions 0, 1, 2 and so on
      up to its own; a window of w keeps the last w of them.
    """

    metadata: KVMetadata
    visibility: Visibility  # of the whole flat batch, padding included
    padding: Padding  # of query rows and keys
    memo: dict[str, Any] = field(factory=dict)
    """Implementations may keep here what they computed for this forward pass, under a name of their own."""

    @property
    def is_fixed(self) -> bool:
        """Whether this is a `FixedPlan`."""
        return False

    @property
    def most_keys(self) -> int:
        """At least as many slots as any token attends to."""
        return max(np.add(self.metadata.starts, self.metadata.lengths).tolist(), default=0)

    def of_rows(self, rows: torch.Tensor, host_rows: Sequence[int] | None = None) -> AttentionPlan:
        """Return the plan of the same forward pass for attention with only one query token per request.

        rows: int64 [batch + padding], the indices of these tokens in the flat batch.
        host_rows: [batch or more], the same on the host; None: they are read from a GPU, which waits for it.
        """
        metadata, seen = self.metadata, self.visibility
        batch = len(metadata.lengths)
        first_rows = np.cumsum(metadata.lengths) - metadata.lengths
        chosen = rows[:batch].cpu().numpy() if host_rows is None else np.array(host_rows[:batch])
        starts = np.array(metadata.starts) + chosen - first_rows
        return AttentionPlan(
            evolve(
                metadata,
                starts=tuple(starts.tolist()),
                lengths=(1,) * batch,
                slot_mapping=metadata.slot_mapping.index_select(0, rows[:batch]),
            ),
            Visibility(
                seen.positions.index_select(0, rows),
                seen.prefix_lens.index_select(0, rows),
                None if seen.more_slots is None else seen.more_slots.index_select(0, rows),
                seen.num_tree_slots,
            ),
            self.padding,
        )

    @cached_property
    def token_requests(self) -> torch.Tensor:
        """int32 [num_tokens]   index of the request that each token belongs to; -1: padding."""
        owners = self.host_token_requests(len(self.visibility.positions))
        return upload(owners, self.metadata.block_tables.device)

    def host_token_requests(self, num_tokens: int) -> np.ndarray:
        """int32 [num_tokens]   `token_requests` on the host, with more padding."""
        lengths = self.metadata.lengths
        owners = np.full(num_tokens, -1, dtype=np.int32)
        owners[: sum(lengths)] = np.arange(len(lengths), dtype=np.int32).repeat(lengths)
        return owners

    @cached_property
    def context_lens(self) -> torch.Tensor:
        """int32 [batch]   the number of KV-cache slots of each request that are in use after this forward pass."""
        ends = np.add(self.metadata.starts, self.metadata.lengths, dtype=np.int32)
        return upload(ends, self.metadata.block_tables.device)

    @cached_property
    def prefix_lens(self) -> torch.Tensor:
        """int32 [num_tokens]   how many slots of its request, from the first on, each token attends to; 0 for
        padding."""
        return torch.where(self.token_requests < 0, 0, self.visibility.prefix_lens).to(torch.int32)

    @cached_property
    def tree_start(self) -> torch.Tensor:
        """int32 [batch]   the slot of the first draft token in each request's tree, after the root (the request's last
        token). Without a tree: the slot after the request's last token in this forward pass, or 0 without tokens."""
        longest = self.context_lens.new_zeros(len(self.context_lens))
        return longest.scatter_reduce_(0, self._owners, self.prefix_lens, "amax")  # padding's prefixes are 0

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """int64 [num_tokens, ceil(n / 64)]   the tree attention mask as bits: bit j is the slot `tree_start + j`. n is
        at least the number of slots of the largest tree; 0 if no request has a tree."""
        return ancestor_bits(self.visibility, self.token_requests, self.prefix_lens, self.tree_start[self._owners])

    @cached_property
    def block_tables(self) -> torch.Tensor:
        """int32 [batch, max_blocks]   indices of each request's KV blocks. Entries after a request's own blocks may be
        blocks of another request."""
        return self.metadata.block_tables.to(torch.int32)

    @cached_property
    def _owners(self) -> torch.Tensor:
        """int64 [num_tokens]   the request of each token, like `token_requests`, but 0 instead of -1 for padding, so
        that it can be used as an index."""
        return self.token_requests.clamp(min=0).long()

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All requests of the forward pass, in segments. Requests with up to SHORT tokens and a similar context length
        share a segment, padded to the longest; each of the other requests has its own segment."""
        starts, lengths = self.metadata.starts, self.metadata.lengths
        rectangles: dict[int, list[int]] = {}
        alone = []
        for request, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            if length > SHORT:
                alone.append([request])
            elif length > 0:
                rectangles.setdefault(round_up(start + length, self.padding.keys).bit_length(), []).append(request)
        return tuple(_segment(np.array(requests), self) for requests in (*rectangles.values(), *alone))


class NotOnHost:
    """Takes the place of numbers that the host does not know while a CUDA graph is captured: whatever is computed with
    them would be repeated by the graph."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise SpecdecError("starts and lengths of requests were read while a CUDA graph was captured")

    __len__ = __iter__ = __getitem__ = __array__ = _refuse


@frozen(eq=False, kw_only=True)
class FixedPlan(AttentionPlan):
    """The plan of a forward pass that is captured in a CUDA graph. Its tensors are read anew whenever the graph is
    replayed, and the host knows nothing that differs between forward passes: reading `metadata.starts` or
    `metadata.lengths` raises SpecdecError."""

    token_requests: torch.Tensor
    context_lens: torch.Tensor

    @classmethod
    def of(
        cls,
        like: AttentionPlan,
        visibility: Visibility,
        *,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        token_requests: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> FixedPlan:
        """like: a plan of the same model."""
        unknown: Any = NotOnHost()
        metadata = KVMetadata(unknown, unknown, block_tables, slot_mapping, like.metadata.block_size)
        return cls(
            metadata=metadata,
            visibility=visibility,
            padding=like.padding,
            token_requests=token_requests,
            context_lens=context_lens,
        )

    @property
    def is_fixed(self) -> bool:
        return True

    @property
    def most_keys(self) -> int:
        return self.metadata.block_tables.shape[1] * self.metadata.block_size


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
    token_rows = upload(first_tokens[:, None] + row, device)
    is_visible = torch.arange(num_keys, device=device) < visibility.prefix_lens[token_rows].unsqueeze(2)
    if visibility.more_slots is not None:
        is_visible.scatter_(2, visibility.more_slots[token_rows], True)

    local = upload(np.minimum(np.arange(num_keys), (starts + lengths - 1)[:, None]), device)
    blocks = metadata.block_tables[upload(requests, device)].gather(1, local // metadata.block_size)
    valid_rows = np.flatnonzero(np.arange(num_rows) < lengths[:, None])
    return Segment(
        token_rows=token_rows,
        key_slots=blocks * metadata.block_size + local % metadata.block_size,
        is_visible=is_visible,
        valid_rows=upload(valid_rows, device),
        valid_tokens=token_rows.flatten()[upload(valid_rows, device)],
        is_whole=len(requests) == len(metadata.lengths)
        and token_rows.numel() == num_padded_tokens
        and (len(requests) == 1 or len(valid_rows) == num_padded_tokens),
    )


def ancestor_bits(
    visibility: Visibility, token_requests: torch.Tensor, prefix_lens: torch.Tensor, tree_starts: torch.Tensor
) -> torch.Tensor:
    """Compute `AttentionPlan.ancestors`: the tree attention mask of each token as bits.

    token_requests: int32 [num_tokens], the index of each token's request; -1: padding.
    prefix_lens: int32 [num_tokens], how many of its request's first slots each token attends to.
    tree_starts: int32 [num_tokens], the KV-cache slot that bit 0 stands for.

    Each token has visibility.num_tree_slots bits. If num_tree_slots is None, the host computes the number of bits, and
    waits for the device.
    """
    slots = visibility.more_slots
    if slots is None:
        return torch.zeros(len(token_requests), 0, dtype=torch.int64, device=token_requests.device)
    is_seen = (slots >= prefix_lens.unsqueeze(1)) & (token_requests >= 0).unsqueeze(1)
    is_seen[:, 1:] &= slots[:, 1:] != slots[:, :-1]  # the last slot of a path repeats
    bits = torch.where(is_seen, slots - tree_starts.unsqueeze(1), 0)
    num_slots = visibility.num_tree_slots
    if num_slots is None:
        num_slots = int(torch.where(is_seen, bits + 1, 0).max())
    words = torch.zeros(len(slots), -(-num_slots // WORD), dtype=torch.int64, device=slots.device)
    if num_slots:
        words.scatter_add_(1, bits // WORD, is_seen.long() << bits % WORD)
    return words
