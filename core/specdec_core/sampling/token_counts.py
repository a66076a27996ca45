"""How often each token occurs in a request, counted once per token."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core.ops.upload import upload


class TokenCounts:
    """Counts of a request's tokens, kept from step to step. Only tokens that were appended since the last step are
    counted and copied to the device.

    start: index of the first token that counts.

    Attributes: counts int32 [vocab], on the device.
    """

    def __init__(self, start: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self._num_read = start
        self._occurs = np.zeros(vocab_size, dtype=bool)
        self._ids = torch.empty(256, dtype=torch.int64, device=device)
        self._num_ids = 0

    @property
    def ids(self) -> torch.Tensor:
        """int64 [n]   the tokens that occur, each once, on the device."""
        return self._ids[: self._num_ids]

    def read(self, token_ids: np.ndarray) -> None:
        """Count the tokens that are new. token_ids: int64, all tokens of the request so far."""
        new = token_ids[self._num_read :]
        if not len(new):
            return
        self._num_read = len(token_ids)
        first = np.unique(new[~self._occurs[new]])
        self._occurs[first] = True
        packed = upload(np.concatenate([first, new]), self.counts.device)
        ids, tokens = packed[: len(first)], packed[len(first) :]
        self.counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))
        start, end = self._num_ids, self._num_ids + len(first)
        if end > len(self._ids):
            self._ids = torch.cat([self._ids, self._ids.new_empty(end)])  # at least twice as long
        self._ids[start:end] = ids
        self._num_ids = end
