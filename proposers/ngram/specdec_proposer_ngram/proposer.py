"""Prompt lookup decoding (Saxena 2023): finds an earlier occurrence of a request's last tokens in the request itself
and drafts the tokens that followed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec_core import Counter, Draft, Proposer, ProposerBatch, RequestView
from specdec_proposer_ngram import index
from specdec_proposer_ngram.config import NgramConfig
from specdec_proposer_ngram.memory import Indexes

if TYPE_CHECKING:
    import torch


class NgramProposer(Proposer):
    """Drafts chains of tokens copied from the request itself, in one compiled call for the whole batch.

    It needs no `reset`: a preempted request keeps its tokens, and its index depends on nothing else.
    """

    def __init__(self, config: NgramConfig, max_num_requests: int, device: torch.device) -> None:
        self._shortest, self._longest = config.lengths
        self._most_recent = config.prompt_lookup_match == "last"
        self._indexes = Indexes(max_num_requests, num_lengths=self._longest - self._shortest + 1)
        self._device = device
        self._num_queries, self._num_hits = 0, 0

    def propose(self, batch: ProposerBatch) -> Draft:
        if not batch.requests:
            return Draft.from_chains([], self._device)
        rows, new_tokens = self._indexes.catch_up(batch.requests)
        most = sum(batch.max_draft_tokens)
        token_ids = np.empty(most, dtype=np.int64)
        parents = np.empty(most, dtype=np.int32)
        counts = np.empty(len(rows), dtype=np.int64)
        index.draft(
            self._indexes.states,
            np.array(rows),
            np.concatenate(new_tokens),
            np.array([len(tokens) for tokens in new_tokens]),
            np.array(batch.max_draft_tokens),
            self._shortest,
            self._longest,
            self._most_recent,
            token_ids,
            parents,
            counts,
        )
        num_nodes = counts.tolist()
        self._num_queries += len(num_nodes)
        self._num_hits += np.count_nonzero(counts)
        total = sum(num_nodes)
        return Draft.from_arrays(
            token_ids[:total], parents[:total], num_nodes, max(num_nodes), is_chain=True, device=self._device
        )

    def metrics(self) -> list[Counter]:
        """For how many requests a match was looked for, once per step, and for how many there was one."""
        return [Counter("queries", self._num_queries), Counter("hits", int(self._num_hits))]

    def finish(self, request: RequestView, reason: str) -> None:
        self._indexes.free(request)
