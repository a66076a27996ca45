"""Copies of requests on the other ranks, for KV managers that read their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field, frozen

from specdec_core.contracts.proposer import RequestView

Slots = tuple[Sequence[str], Sequence[int], Sequence[int]]
"""The arguments of `KVManager.metadata`."""


@frozen(eq=False)
class News:
    """What is new about a request: its tokens from `start` on, int64 [n]."""

    id: str
    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    start: int
    token_ids: np.ndarray


@define(eq=False)
class Sent:
    """Rank 0's notes on how many tokens of each request the other ranks have."""

    _lengths: dict[str, int] = field(factory=dict)

    def news(self, requests: Sequence[RequestView]) -> list[News]:
        return [self._news(request) for request in requests]

    def forget(self, request_id: str) -> None:
        self._lengths.pop(request_id, None)

    def _news(self, request: RequestView) -> News:
        token_ids = request.token_ids
        start = self._lengths.get(request.id, 0)
        self._lengths[request.id] = len(token_ids)
        about = request.id, request.seed, request.num_prompt_tokens, request.num_cached_tokens
        return News(*about, start, token_ids[start:].copy())


@define(eq=False)
class RequestCopy:
    """A `RequestView` on another rank than 0."""

    id: str
    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    token_ids: np.ndarray  # int64 [num_tokens]

    @property
    def prediction(self) -> np.ndarray:
        """Empty: KV managers have no use for it."""
        return self.token_ids[:0]

    @classmethod
    def updated(cls, known: RequestCopy | None, news: News) -> RequestCopy:
        before = news.token_ids[:0] if known is None else known.token_ids[: news.start]
        token_ids = np.concatenate([before, news.token_ids])
        return cls(news.id, news.seed, news.num_prompt_tokens, news.num_cached_tokens, token_ids)
