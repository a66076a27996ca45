"""How often each token occurs in a request, counted once per token."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core.ops.upload import upload


class TokenCounts:
    """Counts of a request's tokens, kept from step to step. Only tokens that were appended since the last step are
    counted and copied to the device.

    start: index of the first token that counts.

    Attributes: counts int32 [2, vocab], on the device: in the prompt, then in the output. The operation `penalize` adds
    the new tokens.
    """

    def __init__(self, start: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(2, vocab_size, dtype=torch.int32, device=device)
        self._num_read = start
        self._occurs = np.zeros(vocab_size, dtype=bool)
        self._new_ids: list[np.ndarray] = []  # not on the device yet
        self._ids = torch.empty(256, dtype=torch.int64, device=device)
        self._num_ids = 0

    @property
    def ids(self) -> torch.Tensor:
        """int64 [n]   the tokens that occur, each once, on the device. Copied there when they are asked for."""
        if self._new_ids:
            new = upload(np.concatenate(self._new_ids), self.counts.device)
            self._new_ids.clear()
            start, end = self._num_ids, self._num_ids + len(new)
            if end > len(self._ids):
                self._ids = torch.cat([self._ids, self._ids.new_empty(end)])  # at least twice as long
            self._ids[start:end] = new
            self._num_ids = end
        return self._ids[: self._num_ids]

    def read(self, token_ids: np.ndarray, num_prompt_tokens: int) -> np.ndarray:
        """Return the places of new tokens in `counts.flatten()`, int64 [num_new].

        token_ids: int64, all tokens of the request so far. num_prompt_tokens: how many of them are its prompt.
        """
        start, self._num_read = self._num_read, max(self._num_read, len(token_ids))
        new = token_ids[start:]
        first = np.unique(new[~self._occurs[new]])
        if len(first):
            self._occurs[first] = True
            self._new_ids.append(first)
        places: np.ndarray = new.copy()
        places[max(0, num_prompt_tokens - start) :] += self.counts.shape[1]
        return places
