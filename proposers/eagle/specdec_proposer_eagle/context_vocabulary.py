"""Drafting tokens that an EAGLE-3 head's reduced vocabulary lacks, if they occurred recently in the request.

The head predicts only the tokens that are most frequent overall, but a single request repeats others, for instance the
tokens of its identifiers. If the head was trained to predict the target's hidden states, the products of its outputs
with rows of the target's LM head are logits of these tokens. A few dozen rows cost little beside the head's own LM
head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec_core import RequestView


class ContextVocabulary:
    """Tracks the most recent tokens of each request that the head's vocabulary lacks, and adds their logits to the
    head's logits.

    own_ids: int64 [draft_vocab], the target's id of each token in the head's vocabulary.
    vocab_size: size of the target's vocabulary.
    num_tokens: largest number of tokens to add for a request.
    rows_of: a function that takes token ids, int64 [...], and returns their rows of the target's LM head, [...,
        hidden].
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
        self._recent: dict[str, dict[int, None]] = {}  # token ids by request, the least recent first
        self._num_read: dict[str, int] = {}
        self._ids = torch.empty(0)  # int64 [batch, num_tokens], filled up with vocab_size
        self._rows = torch.empty(0)  # float32 [batch, num_tokens, hidden]

    def finish(self, request: RequestView) -> None:
        self._recent.pop(request.id, None)  # absent if nothing was drafted for the request
        self._num_read.pop(request.id, None)

    def begin(self, requests: Sequence[RequestView]) -> None:
        """Prepare the next draft: read the requests' new tokens, and fetch the target's LM-head rows of the tokens to
        add."""
        ids = np.full((len(requests), self._num_tokens), self._vocab_size)
        for row, request in zip(ids, requests, strict=True):
            recent = self._read(request)
            row[: len(recent)] = list(recent)
        self._ids = torch.from_numpy(ids).to(self._own_ids.device)
        # float32, as small matrix products in bfloat16 are slower on a CPU
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
        """Return logits over the target's vocabulary, [n, vocab]. They are -inf for tokens that cannot be drafted.

        own: [n, draft_vocab], the logits that the head's LM head computed.
        outputs: [n, hidden], the inputs of the head's LM head. Each request has equally many rows.
        requests: int64 [num_requests], the requests' indices in the batch, ascending.
        """
        ids, rows = self._ids, self._rows
        if len(requests) < len(ids):
            where = torch.from_numpy(requests).to(ids.device)
            ids, rows = ids.index_select(0, where), rows.index_select(0, where)
        width = len(outputs) // max(1, len(requests))
        by_request = outputs.float().view(len(requests), width, outputs.shape[1])
        added = torch.bmm(by_request, rows.mT).flatten(0, 1).to(own.dtype)
        found = own.new_full((len(own), self._vocab_size + 1), -torch.inf)  # the last column is padding
        found.scatter_(1, self._own_ids.expand(len(own), -1), own)
        return found.scatter_(1, ids if width == 1 else ids.repeat_interleave(width, 0), added)[:, :-1]
