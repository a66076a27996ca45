"""Tokens of a request's own text, drafted by a head whose vocabulary lacks them.

A head of EAGLE-3 says the tokens that are most frequent anywhere. In one text others are frequent: the pieces of its
names. A head that learned to put out the target's features leaves what the target's output layer takes, so the rows of
that layer say how likely these are, and a few dozen rows cost little beside the head's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec_core import RequestView


class ContextVocabulary:
    """Keeps the most recent tokens of each request that the head lacks, and adds their logits to the head's.

    own_ids: int64 [draft_vocab], the target's ids of the head's tokens. num_tokens: most tokens to add, for each
    request. rows_of: int64 [...] -> [..., hidden], rows of the target's output layer.
    """

    def __init__(
        self,
        own_ids: torch.Tensor,
        vocab_size: int,
        num_tokens: int,
        rows_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._own_ids, self._vocab_size, self._rows_of = own_ids, vocab_size, rows_of
        self._num_tokens = min(num_tokens, vocab_size - len(own_ids))
        self._lacks = np.ones(vocab_size, dtype=bool)
        self._lacks[own_ids.cpu().numpy()] = False
        self._recent: dict[str, dict[int, None]] = {}  # of each request, the oldest first
        self._num_read: dict[str, int] = {}
        self._ids = torch.empty(0)  # int64 [batch, num_tokens]   vocab_size: none
        self._rows = torch.empty(0)  # float32 [batch, num_tokens, hidden]

    def finish(self, request: RequestView) -> None:
        self._recent.pop(request.id, None)  # there is none if nothing was drafted for it
        self._num_read.pop(request.id, None)

    def begin(self, requests: Sequence[RequestView]) -> None:
        """A draft, of a batch of these."""
        ids = np.full((len(requests), self._num_tokens), self._vocab_size)
        for row, request in zip(ids, requests, strict=True):
            recent = self._read(request)
            row[: len(recent)] = list(recent)
        self._ids = torch.from_numpy(ids).to(self._own_ids.device)
        # In float32, as small products in bfloat16 take a CPU longer.
        self._rows = self._rows_of(self._ids.clamp(max=self._vocab_size - 1)).float()

    def _read(self, request: RequestView) -> dict[int, None]:
        recent = self._recent.setdefault(request.id, {})
        new = request.token_ids[self._num_read.get(request.id, 0) :]
        self._num_read[request.id] = len(request.token_ids)
        for token_id in new[self._lacks[new]].tolist():
            recent.pop(token_id, None)
            recent[token_id] = None
        for token_id in list(recent)[: -self._num_tokens]:
            del recent[token_id]
        return recent

    def logits(self, own: torch.Tensor, outputs: torch.Tensor, requests: np.ndarray) -> torch.Tensor:
        """[n, vocab], -inf for tokens that are neither the head's nor of the request's text.

        own [n, draft_vocab]: of the head's tokens. outputs [n, hidden]: what it made them of, as many rows of each
        request. requests int64 [num_requests]: indices into the batch, ascending.
        """
        ids, rows = self._ids, self._rows
        if len(requests) < len(ids):
            where = torch.from_numpy(requests).to(ids.device)
            ids, rows = ids.index_select(0, where), rows.index_select(0, where)
        width = len(outputs) // max(1, len(requests))
        by_request = outputs.float().view(len(requests), width, outputs.shape[1])
        added = torch.bmm(by_request, rows.mT).flatten(0, 1).to(own.dtype)
        found = own.new_full((len(own), self._vocab_size + 1), -torch.inf)  # the last column is of no token
        found.scatter_(1, self._own_ids.expand(len(own), -1), own)
        return found.scatter_(1, ids if width == 1 else ids.repeat_interleave(width, 0), added)[:, :-1]
