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

from specdec_core import RequestView, upload


class ContextVocabulary:
    """Tracks the most recent tokens of each request that the head's vocabulary lacks, and adds their logits to the
    head's logits. While a request has fewer than num_tokens, other tokens have their places, with logits of -inf.

    own_ids: int64 [draft_vocab], the target's id of each token in the head's vocabulary.
    vocab_size: size of the target's vocabulary.
    num_tokens: largest number of tokens to add for a request.
    rows_of: a function that takes token ids, int64 [...], and returns their rows of the target's LM head, [...,
        hidden].

    Attribute to_target: int64 [batch, draft_vocab + num_tokens], for each request of the draft the target's id of each
    column of `logits`.
    """

    def __init__(
        self,
        own_ids: torch.Tensor,
        vocab_size: int,
        num_tokens: int,
        rows_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._own_ids, self._rows_of = own_ids, rows_of
        self._num_tokens = min(num_tokens, vocab_size - len(own_ids))
        self._lacks = np.ones(vocab_size, dtype=bool)
        self._lacks[own_ids.cpu().numpy()] = False
        self._others = dict.fromkeys(np.flatnonzero(self._lacks)[: self._num_tokens].tolist())
        self._recent: dict[str, dict[int, None]] = {}  # token ids by request, the least recent first
        self._num_read: dict[str, int] = {}
        self._ids: list[str] = []  # of the last draft's requests
        self._rows = torch.empty(0)  # float32 [batch, hidden, num_tokens]
        self._biases = torch.empty(0)  # float32 [batch, 1, num_tokens], 0 or -inf
        self.to_target = torch.empty(0, dtype=torch.int64)

    def finish(self, request: RequestView) -> None:
        self._recent.pop(request.id, None)  # absent if nothing was drafted for the request
        self._num_read.pop(request.id, None)

    def begin(self, requests: Sequence[RequestView]) -> None:
        """Prepare the next draft: read the requests' new tokens and, unless the tokens to add are those of the last
        draft, fetch their rows of the target's LM head."""
        ids, before = [request.id for request in requests], self._ids
        self._ids = []  # an interrupt may leave this half done
        have_new = [self._read(request) for request in requests]
        if any(have_new) or ids != before:
            self._fetch([self._recent[request_id] for request_id in ids])
        self._ids = ids

    def _fetch(self, recent: Sequence[dict[int, None]]) -> None:
        """Fetch the target's LM-head rows of the tokens to add, and of others where a request has too few."""
        chosen = np.array([list(each | self._others)[: self._num_tokens] for each in recent], dtype=np.int64)
        is_recent = np.arange(self._num_tokens) < np.array([len(each) for each in recent])[:, None]
        biases = np.where(is_recent, np.float32(0), np.float32(-np.inf))[:, None]
        ids = upload(chosen, self._own_ids.device)
        # float32, as small matrix products in bfloat16 are slower on a CPU
        self._rows = self._rows_of(ids).float().mT
        self._biases = upload(biases, ids.device)
        self.to_target = torch.cat([self._own_ids.expand(len(ids), -1), ids], dim=1)

    def _read(self, request: RequestView) -> bool:
        """Read a request's new tokens. Returns whether one of them is lacking in the head's vocabulary."""
        recent = self._recent.setdefault(request.id, {})
        new = request.token_ids[self._num_read.get(request.id, 0) :]
        self._num_read[request.id] = len(request.token_ids)
        lacking = new[self._lacks[new]].tolist()
        for token_id in lacking:
            recent.pop(token_id, None)
            recent[token_id] = None
        for token_id in list(recent)[: -self._num_tokens]:
            del recent[token_id]
        return bool(lacking)

    def logits(self, own: torch.Tensor, outputs: torch.Tensor, requests: np.ndarray) -> torch.Tensor:
        """Add the logits of the added tokens to the head's. Returns [n, draft_vocab + num_tokens].

        own: [n, draft_vocab], the logits that the head's LM head computed.
        outputs: [n, hidden], the inputs of the head's LM head. Each request has equally many rows.
        requests: int64 [num_requests], the requests' indices in the batch, ascending.
        """
        rows, biases = self._rows, self._biases
        if len(requests) < rows.shape[0]:
            where = upload(requests, rows.device)
            rows, biases = rows.index_select(0, where), biases.index_select(0, where)
        num_each = outputs.shape[0] // max(1, len(requests))
        by_request = outputs.float().view(len(requests), num_each, outputs.shape[1])
        return torch.cat([own, torch.baddbmm(biases, by_request, rows).flatten(0, 1).to(own.dtype)], dim=1)
