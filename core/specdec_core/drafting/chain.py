"""Grows chains of draft tokens on a CPU, with few operations."""

from __future__ import annotations

import numpy as np
import torch
from attrs import evolve

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import ProposerBatch
from specdec_core.contracts.verifier import Stream
from specdec_core.drafting.distributions import Distributions, to_target
from specdec_core.drafting.level import Level, on_host


class HostChain:
    """Grows chains on a CPU, in numpy: for few requests, most of its operations take less time than torch takes to
    begin one."""

    def __init__(self, batch: ProposerBatch, length: int, distributions: Distributions, min_prob: float) -> None:
        self._batch, self._distributions, self._min_prob = batch, distributions, min_prob
        table = distributions.q_to_target
        self._target_ids = None if table is None else on_host(table)
        self._size = len(batch.max_draft_tokens)
        self._lengths = np.minimum(batch.max_draft_tokens, length)
        self._longest = int(self._lengths.max())
        self._are_alike = bool((self._lengths == self._longest).all())
        self._numbers = torch.arange(self._longest)
        self._requests = np.arange(self._size)  # those that still grow
        self._rows = torch.from_numpy(self._requests)
        self._reach = np.ones(self._size)  # probability of each of these requests' chains
        self._num_forwarded = np.full(self._size, self._longest)  # [batch]   levels of the chains that are complete
        # Of each level: requests, is_alive (False: it has no token), token_ids, scores, q_rows (or None).
        self._levels: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]] = []

    def grow(self, logits: torch.Tensor) -> Level | None:
        requests = self._requests
        token_ids, scores, q_rows = self._next_tokens(logits)
        is_alive = np.isfinite(scores)
        self._levels.append((requests, is_alive, token_ids, scores, q_rows))
        if len(self._levels) == self._longest:
            return None
        goes_on = self._goes_on(is_alive, scores)
        if not goes_on.all():
            rows = np.flatnonzero(goes_on)
            if not len(rows):
                return None
            self._num_forwarded[requests[~goes_on]] = len(self._levels) - 1
            self._requests, self._reach, token_ids = requests[rows], self._reach[rows], token_ids[rows]
            self._rows = torch.arange(len(rows))
            return self._level(torch.from_numpy(rows), token_ids)
        return self._level(self._rows, token_ids)

    def _next_tokens(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Choose or draw a token after each row of logits. Returns int64 [n] of the target's vocabulary, float32 [n]
        with the draft's probability of each, which is NaN if logits are not finite, and int64 [n], rows of q; None: all
        are chosen."""
        distributions, index = self._distributions, torch.from_numpy(self._requests)
        probs = distributions.probs(logits, index)
        found = on_host(probs)
        columns, q_rows = found.argmax(axis=1), None
        if distributions.draws:
            is_sampled, q = on_host(distributions.is_sampled)[self._requests], probs.nan_to_num(0)
            drawn = self._batch.random.categorical(q, Stream.DRAFT, index, torch.full_like(index, len(self._levels)))
            columns = np.where(is_sampled, on_host(drawn), columns)
            q_rows = np.where(is_sampled, on_host(distributions.add(q, index)), -1)
        token_ids = to_target(self._target_ids, self._requests, columns)
        return token_ids, found[np.arange(len(columns)), columns], q_rows

    def _goes_on(self, is_alive: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """bool [n]   which of the requests that still grow get another token.

        is_alive: bool [n], whether the level has a token for each. scores: float32 [n], the draft's probabilities.
        """
        goes_on, requests, levels = is_alive, self._requests, self._batch.levels
        if not self._are_alike:
            goes_on = goes_on & (self._lengths[requests] > len(self._levels))
        if not self._min_prob and levels is None:
            return goes_on
        is_sampled = on_host(self._distributions.is_sampled)[requests]
        if self._min_prob:
            self._reach = self._reach * scores
            goes_on = goes_on & ((self._reach >= self._min_prob) | is_sampled)
        if levels is None or not goes_on.any():
            return goes_on
        rows, num_next = np.flatnonzero(is_alive), np.zeros(self._size, dtype=np.int64)
        num_next[requests] = goes_on
        paid = levels.goes_on(requests[rows], rows, scores[rows], is_sampled[rows], num_next)
        both: np.ndarray = goes_on & paid[requests]
        return both

    def _level(self, rows: torch.Tensor, token_ids: np.ndarray) -> Level:
        depth, starts = len(self._levels), (len(self._levels) - 1,) * self._size
        if len(rows) < self._size:
            starts = tuple(np.minimum(self._num_forwarded, depth - 1).tolist())
        return Level(
            width=1,
            requests=self._requests,
            rows=rows,
            token_ids=torch.from_numpy(token_ids),
            ancestors=self._numbers[:depth].expand(len(rows), depth),
            starts=starts,
            is_chain=True,
        )

    def build(self) -> Draft:
        """Return the draft for all requests of the batch, with the draft model's probabilities as `scores`."""
        requests, is_alive, token_ids, scores, q_rows = zip(*self._levels, strict=True)
        exists = self._table(requests, is_alive)
        counts = exists.sum(axis=1).tolist()
        numbers = np.broadcast_to(np.arange(-1, len(self._levels) - 1, dtype=np.int32), exists.shape)
        fields = self._distributions.fields()
        draft = Draft.from_arrays(
            self._table(requests, token_ids)[exists],
            numbers[exists],
            counts,
            max(counts),
            scores=self._table(requests, scores)[exists],
            is_chain=True,
        )
        if fields["q"] is None:
            return draft
        rows = self._table(requests, q_rows)[exists].astype(np.int32)
        return evolve(draft, q_rows=torch.from_numpy(rows), **fields)

    def _table(self, requests: tuple[np.ndarray, ...], levels: tuple[np.ndarray, ...]) -> np.ndarray:
        """Arrange values of levels by request: [batch, number of levels], 0 where a level has none. requests: of each
        level, those of its values."""
        if all(len(level) == self._size for level in levels):
            return np.stack(levels, axis=1)
        table = np.zeros((self._size, len(levels)), dtype=levels[0].dtype)
        for depth, (owners, level) in enumerate(zip(requests, levels, strict=True)):
            table[owners, depth] = level
        return table
