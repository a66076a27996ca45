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

        own [n, draft_vocab]: of the head's tokens. outputs [n, hidden]: what it made them of. requests int64 [n]:
        indices into the batch.
        """
        found = own.new_full((len(own), self._vocab_size + 1), -torch.inf)  # the last column is of no token
        found.scatter_(1, self._own_ids.expand(len(own), -1), own)
        places = _places(requests)
        where = tuple(torch.from_numpy(index).to(own.device) for index in (requests, places))
        by_request = self._rows.new_zeros(len(self._rows), int(places.max(initial=-1)) + 1, outputs.shape[1])
        by_request[where] = outputs.float()
        added = torch.bmm(by_request, self._rows.mT)[where].to(own.dtype)
        return found.scatter_(1, self._ids.index_select(0, where[0]), added)[:, :-1]


def _places(requests: np.ndarray) -> np.ndarray:
    """int64 [n]   how many before each are of the same request."""
    order = np.argsort(requests, kind="stable")
    ordered = requests[order]
    places = np.empty_like(requests)
    places[order] = np.arange(len(requests)) - np.searchsorted(ordered, ordered)
    return places
