"""Block tables: which request owns which KV blocks. Bookkeeping on the host only, without tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec_core.errors import CapacityError
from specdec_core.kv.block_tables import BlockTables


class BlockPool:
    """Block tables of all requests over `num_blocks` interchangeable blocks of `block_size` KV-cache slots.

    A subclass for prefix caching overrides `take`, `give` and `hold`. If Ctrl-C interrupts a method, the list of free
    blocks (`recount`) and `rows` are rebuilt before they are used again.

    Attributes: rows, the block tables as rows of one array.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # the lowest number is handed out first
        self._tables: dict[str, list[int]] = {}
        self._is_moving = False
        self.rows = BlockTables()

    @property
    def num_free(self) -> int:
        self._settle()
        return len(self._free)

    def take(self, number: int) -> list[int]:
        """Remove `number` blocks from the list of free blocks and return them. The caller has checked that there are
        enough."""
        start = len(self._free) - number
        blocks, self._free[start:] = self._free[start:][::-1], []
        return blocks

    def give(self, blocks: Sequence[int]) -> None:
        """Add blocks that a request no longer needs to the list of free blocks. blocks: in the order of the request's
        block table."""
        self._free.extend(reversed(blocks))

    def hold(self, blocks: Sequence[int]) -> None:
        """Record that another request uses blocks that are already filled. Does nothing here; subclasses for prefix
        caching override it."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def blocks(self, request_id: str) -> list[int]:
        """The indices of a request's KV blocks, in the order of its block table. Do not modify the list."""
        return self._tables[request_id]

    def add(self, request_id: str, blocks: Sequence[int] = ()) -> None:
        """Add a request. blocks: filled blocks with which its block table begins, found by prefix caching."""
        self._settle()
        self._is_moving = True
        self.hold(blocks)
        self._tables[request_id] = list(blocks)
        self.rows.add(request_id, self._tables[request_id])
        self._is_moving = False

    def grow(self, request_id: str, num_slots: int) -> None:
        """Give the request enough blocks for `num_slots` slots. Raises CapacityError, and changes nothing, if too few
        are free."""
        self._settle()
        table = self._tables[request_id]
        missing = -(-num_slots // self.block_size) - len(table)
        if missing <= 0:
            return
        if missing > self.num_free:
            raise CapacityError(
                f"request {request_id!r} needs {missing} more KV blocks of {self.block_size} tokens for {num_slots} "
                f"tokens, and {self.num_free} of {self.num_blocks} are free: run fewer requests at once, shorten "
                f"them, or raise num_kv_blocks"
            )
        self._is_moving = True
        self.rows.change(request_id, len(table))
        table += self.take(missing)
        self._is_moving = False

    def shrink(self, request_id: str, num_slots: int) -> None:
        """Free the blocks that the request's first `num_slots` slots do not need."""
        self._settle()
        table, kept = self._tables[request_id], -(-num_slots // self.block_size)
        if len(table) > kept:
            self._is_moving = True
            self.rows.change(request_id, kept)
            freed, table[kept:] = table[kept:], []
            self.give(freed)
            self._is_moving = False

    def drop(self, request_id: str) -> None:
        """Free all blocks of the request. Unknown ids are ignored."""
        self._settle()
        self._is_moving = True
        self.give(self._tables.pop(request_id, []))
        self.rows.remove(request_id)
        self._is_moving = False

    def num_slots(self, request_id: str) -> int:
        """How many KV-cache slots the request's blocks have."""
        return len(self._tables[request_id]) * self.block_size

    def places(self, request_ids: list[str], starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return where the slots [start, start + length) of each request are in the storage, int64 [sum of lengths].
        The requests must hold these slots.

        starts, lengths: int64 [batch].
        """
        tables, size = self.tables(request_ids), self.block_size
        of, slots = np.arange(len(lengths)), starts
        if not (lengths == 1).all():
            of = of.repeat(lengths)
            slots = np.arange(len(of)) + (starts - (lengths.cumsum() - lengths)).repeat(lengths)
        blocks, offsets = np.divmod(slots, size)
        places: np.ndarray = tables[of, blocks] * size + offsets
        return places

    def tables(self, request_ids: list[str]) -> np.ndarray:
        """Return the block tables of these requests, int64 [batch, max_blocks], padded with block 0: an array that all
        forward passes of a step share. Do not modify it. It is valid until a request's blocks change."""
        self._settle()
        return self.rows.of(request_ids)

    def _settle(self) -> None:
        if self._is_moving:
            self.recount()
            self.rows = BlockTables()
            for request_id, blocks in self._tables.items():
                self.rows.add(request_id, blocks)
            self._is_moving = False

    def recount(self) -> None:
        """Rebuild the list of free blocks, which are all blocks that are in no request's block table."""
        held = {block for table in self._tables.values() for block in table}
        self._free = [block for block in range(self.num_blocks - 1, -1, -1) if block not in held]

    def check_integrity(self) -> None:
        self._settle()
        places = sorted([*self._free, *(block for table in self._tables.values() for block in table)])
        assert places == list(range(self.num_blocks)), f"blocks lost or held twice: {places}"
