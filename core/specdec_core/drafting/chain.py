"""Grows chains of draft tokens: each token has at most one child."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from specdec_core.config.draft_options import GREEDY
from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.contracts.proposer import ProposerBatch
from specdec_core.contracts.verifier import Stream
from specdec_core.drafting.distributions import Distributions
from specdec_core.drafting.level import Level, may_shrink, on_host


class Chain:
    """Grows a chain for every request, one draft token per level, up to `length` and the request's max_draft_tokens.

    A request that `batch.levels` stops, or whose logits are not finite, gets no more tokens. On a GPU the host does not
    wait for the device: tokens that a request did not get are dead (padding).

    method: "greedy", "probabilistic" or "auto": see `DraftBuilder`.
    q_to_target: int64 [draft_vocab] or [batch, draft_vocab], maps draft token ids to target token ids, for all requests
        or for each; None if they are the same.
    min_prob: a request whose tokens are chosen gets no more once the probability of its chain is lower than this.
    """

    def __init__(
        self,
        batch: ProposerBatch,
        length: int,
        method: str = GREEDY,
        q_to_target: torch.Tensor | None = None,
        min_prob: float = 0.0,
    ) -> None:
        self._batch, self._min_prob = batch, min_prob
        self._distributions = Distributions(batch, method, q_to_target)
        self._size, device = len(batch.max_draft_tokens), batch.root_token_ids.device
        self._may_shrink = may_shrink(device)
        self._lengths = np.minimum(batch.max_draft_tokens, length)
        self._numbers = torch.arange(int(self._lengths.max()), device=device)
        # Requests that still grow. On a GPU these are all, and those that have stopped are not alive.
        self._requests = np.arange(self._size)
        self._index = torch.from_numpy(self._requests).to(device)
        self._is_alive = torch.ones(self._size, dtype=torch.bool, device=device)
        self._has_token = torch.from_numpy(np.arange(len(self._numbers)) < self._lengths[:, None]).to(device)
        self._reach = torch.ones(self._size, device=device)  # probability of each of these requests' chains
        self._num_forwarded = np.zeros(self._size, dtype=np.int64)  # [batch]
        self._levels: list[tuple[torch.Tensor, ...]] = []  # of each: requests, is_alive, token_ids, scores, q_rows

    def grow(self, logits: torch.Tensor) -> Level | None:
        token_ids, scores, q_rows = self._next_tokens(logits)
        is_alive = scores.isfinite()
        if not self._may_shrink:
            is_alive &= self._is_alive & self._has_token[:, len(self._levels)]
        self._levels.append((self._index, is_alive, token_ids, scores, q_rows))
        if len(self._levels) == len(self._numbers):
            return None
        goes_on = is_alive
        if self._min_prob:
            self._reach = self._reach * scores
            is_likely = self._reach >= self._min_prob
            goes_on = is_alive & (is_likely | self._distributions.is_sampled[self._index])
        if not self._may_shrink:
            self._is_alive = goes_on
            return self._level(self._index, token_ids, is_alive)
        rows = np.flatnonzero(self._goes_on(on_host(is_alive), on_host(goes_on), scores))
        if not len(rows):
            return None
        kept = torch.from_numpy(rows)
        if len(rows) < len(self._requests):
            token_ids = token_ids[kept]
            self._requests, self._index, self._reach = self._requests[rows], self._index[kept], self._reach[kept]
        return self._level(kept, token_ids, None)

    def _next_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose or draw a token after each row of logits. Returns int64 [n] of the target's vocabulary, float32 [n]
        with the draft's probability of each, which is NaN if logits are not finite, and int64 [n], rows of q."""
        distributions, index = self._distributions, self._index
        probs = distributions.probs(logits, index)
        scores, columns = probs.max(dim=-1)
        q_rows = torch.full_like(index, -1)
        if distributions.draws:
            is_sampled, q = distributions.is_sampled[index], probs.nan_to_num(0)
            keys = torch.full_like(index, len(self._levels))
            drawn = self._batch.random.categorical(q, Stream.DRAFT, index, keys)
            columns = torch.where(is_sampled, drawn, columns)
            scores = probs.gather(1, columns[:, None])[:, 0]
            q_rows = distributions.add(q, index).masked_fill(~is_sampled, -1)
        return distributions.to_target(index, columns), scores, q_rows

    def _goes_on(self, is_alive: np.ndarray, goes_on: np.ndarray, scores: torch.Tensor) -> np.ndarray:
        """bool [n]   which of the requests that still grow get another token. On a CPU.

        is_alive: bool [n], whether the level has a token for each. goes_on: bool [n], False: it gets no other.
        scores: float32 [n], the draft's probability of each token.
        """
        goes_on = goes_on & (self._lengths[self._requests] > len(self._levels))
        levels = self._batch.levels
        if levels is None or not goes_on.any():
            return goes_on
        rows = np.flatnonzero(is_alive)
        requests = self._requests[rows]
        is_first = on_host(self._distributions.is_sampled)[requests]
        num_next = np.zeros(self._size, dtype=np.int64)
        num_next[self._requests] = goes_on
        paid = levels.goes_on(requests, rows, on_host(scores)[rows], is_first, num_next)
        goes_on &= paid[self._requests]
        return goes_on

    def _level(self, rows: torch.Tensor, token_ids: torch.Tensor, is_alive: torch.Tensor | None) -> Level:
        depth, starts = len(self._levels), tuple(self._num_forwarded.tolist())
        self._num_forwarded[self._requests] += 1
        return Level(
            width=1,
            requests=self._requests,
            rows=rows,
            token_ids=token_ids,
            ancestors=self._numbers[:depth].expand(len(rows), depth),
            starts=starts,
            is_chain=True,
            is_alive=is_alive,
        )

    def build(self) -> Draft:
        """Return the draft for all requests of the batch, with the draft model's probabilities as `scores`."""
        requests, *parts = zip(*self._levels, strict=True)
        is_alive, token_ids, scores, q_rows = (_table(requests, part, self._size) for part in parts)
        numbers = self._numbers[: len(self._levels)].expand_as(token_ids)
        if self._may_shrink:
            counts, kept = is_alive.sum(dim=1).tolist(), is_alive.flatten().nonzero()[:, 0]
            parents = numbers - 1
        else:
            counts = self._lengths.tolist()
            places = np.arange(self._size * len(self._numbers)).reshape(self._size, -1)
            kept = torch.from_numpy(places[np.arange(len(self._numbers)) < self._lengths[:, None]]).to(numbers.device)
            parents = torch.where(is_alive, numbers - 1, DEAD)
        fields = self._distributions.fields()
        return Draft(
            token_ids=token_ids.flatten().index_select(0, kept),
            parents=parents.flatten().index_select(0, kept).to(torch.int32),
            offsets=tuple(accumulate(counts, initial=0)),
            max_depth=max(counts),
            q_rows=None if fields["q"] is None else q_rows.flatten().index_select(0, kept).to(torch.int32),
            scores=scores.flatten().index_select(0, kept),
            is_chain=True,
            **fields,
        )


def _table(requests: tuple[torch.Tensor, ...], levels: tuple[torch.Tensor, ...], size: int) -> torch.Tensor:
    """Arrange values of levels by request: [size, number of levels], 0 where a level has none.

    requests: int64 [n] of each level, the requests of its values. levels: [n] each.
    """
    if all(len(level) == size for level in levels):
        return torch.stack(levels, dim=1)
    table = levels[0].new_zeros(size, len(levels))
    for depth, (owners, level) in enumerate(zip(requests, levels, strict=True)):
        table[owners, depth] = level
    return table
