"""Memory for the n-gram indexes of all requests, allocated at a request's first draft and freed when it finishes."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from attrs import define, field

from specdec_core import RequestRows, RequestView

HUGE_PAGE = 2 << 20
"""Bytes of a huge page of Linux. With small ones, address translation costs about as much as fetching a slot."""


LINE = 64
"""Bytes of a cache line."""


def zeros(num_bytes: int) -> np.ndarray:
    """Return zeroed memory, uint8 [num_bytes or more]. If it is large, it uses huge pages where the system has them."""
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(num_bytes, dtype=np.uint8)
    whole_pages = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, whole_pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


@define(eq=False)
class Block:
    """The memory of one request's index: its hash table and a copy of its tokens."""

    row: int  # in Indexes.states
    capacity: int  # in tokens
    num_lengths: int  # number of n-gram lengths
    num_tokens: int = field(init=False, default=0)  # tokens that the index has
    _memory: np.ndarray = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._memory = zeros(self._shift + 8 * self.num_slots + 4 * self.capacity)

    @property
    def num_slots(self) -> int:
        """Number of slots of the hash table. There is one for each token and n-gram length, and an eighth of all slots
        stays empty, since the search in a full table is slow."""
        return self.capacity * self.num_lengths * 8 // 7 + 1

    @property
    def _shift(self) -> int:
        """Offset in bytes at which the hash table begins in the block's memory. It differs from request to request;
        otherwise the hash tables of requests of equal length would compete for the same cache lines."""
        return self.row % 64 * LINE

    @property
    def state(self) -> tuple[int, ...]:
        """The values of the request's row in `Indexes.states`. The module `index` explains the columns."""
        address = self._memory.ctypes.data + self._shift
        return address, self.num_slots, address + 8 * self.num_slots, self.capacity, self.num_tokens, 0


class Indexes:
    """The n-gram indexes of all requests, by request id.

    states: int64 [max_num_requests, 6], a row for each request. The module `index` explains the columns.
    """

    def __init__(self, max_num_requests: int, num_lengths: int) -> None:
        self.states = np.zeros((max_num_requests, 6), dtype=np.int64)
        self._num_lengths = num_lengths
        self._rows = RequestRows(max_num_requests)
        self._blocks: dict[str, Block] = {}

    def catch_up(self, requests: Sequence[RequestView]) -> tuple[list[int], list[np.ndarray]]:
        """Return each request's row of `states` and the tokens that its index lacks. The caller must append these
        tokens to the index, since later calls do not return them again."""
        rows, new_tokens = [], []
        for request in requests:
            token_ids = request.token_ids
            num_tokens = len(token_ids)
            block = self._blocks.get(request.id)
            if block is None or block.capacity < num_tokens:
                block = self._allocate(request, num_tokens)
            rows.append(block.row)
            new_tokens.append(token_ids[block.num_tokens :])
            block.num_tokens = num_tokens
        return rows, new_tokens

    def free(self, request: RequestView) -> None:
        self._blocks.pop(request.id, None)
        self._rows.finish(request)

    def _allocate(self, request: RequestView, num_tokens: int) -> Block:
        """Allocate an empty index with room for 1.5 times `num_tokens`, and free the request's old index. All tokens
        must then be appended again. Still, a token is appended at most three times on average."""
        self._blocks.pop(request.id, None)
        row = self._rows.start(request)
        block = Block(row, capacity=num_tokens * 3 // 2 + 64, num_lengths=self._num_lengths)
        self.states[block.row] = block.state
        self._blocks[request.id] = block
        return block
