"""Memory for the indexes of all requests: given out when a request is first seen, taken back when it has finished."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field

from specdec_core import RequestView
from specdec_proposer_ngram.index import SLOTS_PER_TOKEN

LINE = 64
"""Bytes in a line of the cache. Tokens and slots begin with a line."""


@define(eq=False)
class Block:
    """What one request has. capacity: in tokens, a multiple of LINE."""

    row: int  # of Indexes.states
    capacity: int
    num_tokens: int = field(init=False, default=0)  # of the request, known to its index
    _memory: np.ndarray = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._memory = np.zeros(4 * self.capacity * (1 + SLOTS_PER_TOKEN) + LINE, dtype=np.uint8)

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Its row of states, as `index` has them."""
        address = self._memory.ctypes.data
        return address + -address % LINE, self.capacity, self.num_tokens, self.capacity.bit_length()


class Indexes:
    """The indexes of requests, by id. states: see `index`."""

    def __init__(self, max_num_requests: int) -> None:
        self.states = np.zeros((max_num_requests, 4), dtype=np.int64)
        self._free_rows = list(range(max_num_requests))
        self._blocks: dict[str, Block] = {}

    def catch_up(self, requests: Sequence[RequestView]) -> tuple[list[int], list[np.ndarray]]:
        """Each request's row of states, and the tokens that its index does not know yet: it is to take them over."""
        rows, new_tokens = [], []
        for request in requests:
            token_ids = request.token_ids
            num_tokens = len(token_ids)
            block = self._blocks.get(request.id)
            if block is None or block.capacity < num_tokens:
                block = self._give(request.id, num_tokens)
            rows.append(block.row)
            new_tokens.append(token_ids[block.num_tokens :])
            block.num_tokens = num_tokens
        return rows, new_tokens

    def free(self, request_id: str) -> None:
        block = self._blocks.pop(request_id, None)
        if block is not None:
            self._free_rows.append(block.row)

    def _give(self, request_id: str, num_tokens: int) -> Block:
        """A new, empty block with room for as many tokens again. One that was outgrown is left: its index starts over,
        so that a token is taken over at most twice on average."""
        self.free(request_id)
        block = Block(self._free_rows.pop(), capacity=-(-max(num_tokens, 1) * 2 // LINE) * LINE)
        self.states[block.row] = block.state
        self._blocks[request_id] = block
        return block
