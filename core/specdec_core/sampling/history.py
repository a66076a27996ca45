"""The token ids before a position, for custom logits processors, without a copy of the whole context for each row."""

from __future__ import annotations

import weakref

import numpy as np


class History:
    """Makes the histories of a request's rows: read-only arrays of its tokens and the draft tokens on a row's path.
    They share a buffer, to which only new tokens are copied. An array that a processor keeps does not change: as long
    as it or a view of it exists, the next histories get another buffer."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, dtype=np.int64)
        self._num_read = 0
        self._newest: weakref.ref[np.ndarray] | None = None  # history, while it or a view exists

    def of(self, token_ids: np.ndarray, path: np.ndarray) -> np.ndarray:
        """Return token_ids and then path, int64 [num_tokens + depth], read-only. token_ids: int64 [num_tokens], which
        begin with those of earlier calls."""
        known, length = len(token_ids), len(token_ids) + len(path)
        if length > len(self._buffer) or (self._newest is not None and self._newest() is not None):
            self._buffer, self._num_read = np.empty(2 * length, dtype=np.int64), 0
        self._buffer[self._num_read : known] = token_ids[self._num_read :]
        self._buffer[known:length] = path
        self._num_read = known
        # An array from a buffer keeps no reference to another array: its views refer to it.
        history = np.frombuffer(self._buffer.data.toreadonly(), dtype=np.int64, count=length)
        self._newest = weakref.ref(history)
        return history
