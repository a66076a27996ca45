"""Memory for the indexes of all requests: given out when a request is first seen, taken back when it has finished."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from attrs import define, field

from specdec_core import RequestRows, RequestView

HUGE_PAGE = 2 << 20
"""Bytes. Where Linux gives them, a long text has few pages, and the processor knows where all of them are: else finding
the page costs about as much as fetching the slot."""


LINE = 64
"""Bytes in a line of the cache."""


def zeros(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes or more]."""
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(num_bytes, dtype=np.uint8)
    whole_pages = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, whole_pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


@define(eq=False)
class Block:
    """What one request has. capacity: in tokens."""

    row: int  # of Indexes.states
    capacity: int
    num_lengths: int  # of n-grams
    num_tokens: int = field(init=False, default=0)  # of the request, known to its index
    _memory: np.ndarray = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._memory = zeros(self._shift + 8 * self.num_slots + 4 * self.capacity)

    @property
    def num_slots(self) -> int:
        """An end fills at most one for each length. A table that is nearly full is slow: an eighth stays empty."""
        return self.capacity * self.num_lengths * 8 // 7 + 1

    @property
    def _shift(self) -> int:
        """Bytes. Memory begins with a page: the ends of texts of one length would all have the same few lines of the
        cache."""
        return self.row % 64 * LINE

    @property
    def state(self) -> tuple[int, ...]:
        """Its row of states, as `index` has them."""
        address = self._memory.ctypes.data + self._shift
        return address, self.num_slots, address + 8 * self.num_slots, self.capacity, self.num_tokens, 0


class Indexes:
    """The indexes of requests, by id. states: see `index`."""

    def __init__(self, max_num_requests: int, num_lengths: int) -> None:
        self.states = np.zeros((max_num_requests, 6), dtype=np.int64)
        self._num_lengths = num_lengths
        self._rows = RequestRows(max_num_requests)
        self._blocks: dict[str, Block] = {}

    def catch_up(self, requests: Sequence[RequestView]) -> tuple[list[int], list[np.ndarray]]:
        """Each request's row of states, and the tokens that its index does not know yet: it is to take them over."""
        rows, new_tokens = [], []
        for request in requests:
            token_ids = request.token_ids
            num_tokens = len(token_ids)
            block = self._blocks.get(request.id)
            if block is None or block.capacity < num_tokens:
                block = self._give(request, num_tokens)
            rows.append(block.row)
            new_tokens.append(token_ids[block.num_tokens :])
            block.num_tokens = num_tokens
        return rows, new_tokens

    def free(self, request: RequestView) -> None:
        self._blocks.pop(request.id, None)
        self._rows.finish(request)

    def _give(self, request: RequestView, num_tokens: int) -> Block:
        """A new, empty block with room for half as many tokens again. One that was outgrown is left: its index starts
        over, so that a token is taken over at most three times on average."""
        self._blocks.pop(request.id, None)
        row = self._rows.start(request)
        block = Block(row, capacity=num_tokens * 3 // 2 + 64, num_lengths=self._num_lengths)
        self.states[block.row] = block.state
        self._blocks[request.id] = block
        return block
