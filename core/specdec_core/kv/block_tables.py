"""The block tables of all requests as rows of one array, in which only entries that change are written."""

from __future__ import annotations

from itertools import pairwise

import numpy as np


class BlockTables:
    """Copies of requests' block tables (lists of blocks) in the rows of one array. Rows are in the order in which the
    requests were added, so a batch of all requests, or of neighbors, is a view of the array. Entries after a request's
    blocks are 0.
    """

    def __init__(self) -> None:
        self._array = np.zeros((8, 16), dtype=np.int64)  # another object when larger: the sizes at least double
        self._rows: dict[str, int] = {}
        self._blocks: list[list[int]] = []  # of each row, the request's list, which grows and shrinks
        self._num_written: list[int] = []  # of each row
        self._unwritten: dict[str, int] = {}  # of requests whose list changed: the first entry that may be out of date
        self._written: dict[int, tuple[int, int]] = {}  # of rows: the entries [start, end) written, see take_written
        self._last: tuple[list[str], np.ndarray] | None = None  # the last result of `of`, while valid

    def add(self, request_id: str, blocks: list[int]) -> None:
        """Add a row after those of all other requests. blocks: the request's list, which the caller may change."""
        self._rows[request_id] = len(self._blocks)
        self._blocks.append(blocks)
        self._num_written.append(0)
        self._unwritten[request_id] = 0

    def change(self, request_id: str, start: int) -> None:
        """Record that a request's list may change from entry `start` on. Call it before the change."""
        self._unwritten[request_id] = min(start, self._unwritten.get(request_id, start))

    def remove(self, request_id: str) -> None:
        """Remove a request's row. The rows after it move up by one. Unknown ids are ignored."""
        if request_id not in self._rows:
            return
        array, row, self._last = self.array(), self._rows.pop(request_id), None
        lengths = [*self._num_written[row:], 0]
        del self._blocks[row], self._num_written[row]
        self._rows = {other: at - (at > row) for other, at in self._rows.items()}
        end, width = len(self._blocks), max(lengths)
        array[row:end, :width] = array[row + 1 : end + 1, :width]
        array[end, :width] = 0
        for moved, before_and_after in enumerate(pairwise(lengths), start=row):
            self._note(moved, 0, max(before_and_after))

    def array(self) -> np.ndarray:
        """Write what changed, and return all rows: int64 [num_rows, max_blocks], at least as large as needed."""
        if self._unwritten:
            self._last = None
            self._make_room()
            for request_id, start in self._unwritten.items():
                row = self._rows[request_id]
                blocks, end = self._blocks[row], self._num_written[row]
                self._array[row, start : len(blocks)] = blocks[start:]
                self._array[row, len(blocks) : end] = 0
                self._note(row, start, max(len(blocks), end))  # before the next line: Ctrl-C may come between them
                self._num_written[row] = len(blocks)
            self._unwritten.clear()
        return self._array

    def of(self, request_ids: list[str]) -> np.ndarray:
        """Return the rows of these requests, int64 [batch, max_blocks], the same object until a request's blocks
        change. It is a view of the array if the requests are neighbors there."""
        array = self.array()
        if self._last is None or self._last[0] != request_ids:
            self._last = list(request_ids), array[self.indices(request_ids)]
        return self._last[1]

    def indices(self, request_ids: list[str]) -> slice | np.ndarray:
        """Return the indices of the requests' rows: a slice if they are neighbors in this order, else int64 [batch]."""
        rows = [self._rows[request_id] for request_id in request_ids]
        first = rows[0] if rows else 0
        is_run = rows == list(range(first, first + len(rows)))
        return slice(first, first + len(rows)) if is_run else np.array(rows)

    def take_written(self) -> np.ndarray:
        """Return the indices of the entries that were written since the last call, in the flattened array."""
        width = self._array.shape[1]
        spans = [np.arange(row * width + start, row * width + end) for row, (start, end) in self._written.items()]
        self._written.clear()
        return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)

    def _note(self, row: int, start: int, end: int) -> None:
        earlier = self._written.get(row, (start, end))
        self._written[row] = min(start, earlier[0]), max(end, earlier[1])

    def _make_room(self) -> None:
        (num_rows, width), longest = self._array.shape, max(map(len, self._blocks))
        if len(self._blocks) > num_rows or longest > width:
            num_rows = num_rows if len(self._blocks) <= num_rows else 2 * len(self._blocks)
            larger = np.zeros((num_rows, width if longest <= width else 2 * longest), dtype=np.int64)
            larger[: len(self._array), :width] = self._array
            self._array = larger
