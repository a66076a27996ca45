"""Which block belongs to whom. Host-side bookkeeping only: no tensor is touched here."""

from __future__ import annotations

import numpy as np

from specdec_core.errors import CapacityError


class BlockPool:
    """Block tables of all requests, over `num_blocks` interchangeable blocks of `block_size` slots."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # the lowest number is handed out first
        self._tables: dict[str, list[int]] = {}
        self._last: tuple[list[str], np.ndarray] | None = None  # what `tables` gave, while it holds

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def grow(self, request_id: str, num_slots: int) -> None:
        """Give the request blocks for `num_slots` slots in all. Raises CapacityError and changes nothing."""
        held = self._tables.get(request_id, [])
        missing = -(-num_slots // self.block_size) - len(held)
        if missing > len(self._free):
            raise CapacityError(
                f"request {request_id!r} needs {missing} more KV blocks of {self.block_size} tokens for {num_slots} "
                f"tokens, and {len(self._free)} of {self.num_blocks} are free: run fewer requests at once, shorten "
                f"them, or raise num_kv_blocks"
            )
        table = self._tables.setdefault(request_id, held)
        if missing > 0:
            self._last = None
        for _ in range(missing):
            table.append(self._free.pop())

    def shrink(self, request_id: str, num_slots: int) -> None:
        """Free the blocks past the first `num_slots` slots."""
        table = self._tables[request_id]
        while len(table) > -(-num_slots // self.block_size):
            self._last = None
            self._free.append(table.pop())

    def drop(self, request_id: str) -> None:
        """Free all blocks of the request, if there is such a request."""
        self._last = None
        self._free.extend(reversed(self._tables.pop(request_id, [])))

    def num_slots(self, request_id: str) -> int:
        """How many slots its blocks have."""
        return len(self._tables[request_id]) * self.block_size

    def tables(self, request_ids: list[str]) -> np.ndarray:
        """int64 [batch, max_blocks], padded with block 0. Read only: the passes of a step share it."""
        if self._last is not None and self._last[0] == request_ids:
            return self._last[1]
        tables = [self._tables[request_id] for request_id in request_ids]
        padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        self._last = list(request_ids), padded
        return padded

    def check_integrity(self) -> None:
        places = sorted([*self._free, *(block for table in self._tables.values() for block in table)])
        assert places == list(range(self.num_blocks)), f"blocks lost or held twice: {places}"
