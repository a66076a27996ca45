"""Stores the target's hidden states of requests that do not draft, until a proposer sees them (a late observation)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from attrs import define, field

from specdec_core.contracts.proposer import Observation
from specdec_core.engine.request import Request


@define(eq=False)
class _Step:
    """The hidden states of one forward pass, of all requests that do not draft: {tap: [num_rows, width]}."""

    features: Mapping[str, torch.Tensor]
    num_rows: int
    num_live: int  # rows of requests that are still stored


@define(eq=False)
class _Kept:
    """The stored hidden states of one request, which its proposer has not seen yet. They begin at position `start` and
    have no gap. parts: (forward pass, first row, number of rows)."""

    request: Request
    start: int
    num_tokens: int = 0
    parts: list[tuple[_Step, int, int]] = field(factory=list)

    def features(self, tap: str) -> list[torch.Tensor]:
        return [step.features[tap][row : row + number] for step, row, number in self.parts]


class Arrears:
    """Stores hidden states until the proposer sees them in a late observation.

    Storing is cheap, since a request that does not draft should cost little more than in plain decoding: the requests
    of a forward pass share a tensor. Once more than half of all stored rows are of requests that are gone, the others
    get copies of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._kept: dict[str, _Kept] = {}
        self._device = device
        self.num_tokens = 0  # of all requests
        self._num_rows = 0  # that are in memory

    def __contains__(self, request: Request) -> bool:
        return request.id in self._kept

    def keep(self, requests: Sequence[Request], counts: Sequence[int], features: Mapping[str, torch.Tensor]) -> None:
        """Store the hidden states of a forward pass, from position `num_computed` of each request on.

        counts: [n], the number of tokens of each request; 0: nothing is stored for it.
        features: {tap: [sum(counts), width]}, which are not written to afterwards.
        """
        num_rows = sum(counts)
        if not num_rows:
            return
        step, row = _Step(features, num_rows, num_rows), 0
        for request, count in zip(requests, counts, strict=True):
            if count:
                kept = self._kept.get(request.id)
                if kept is None:
                    kept = self._kept[request.id] = _Kept(request, request.num_computed)
                kept.parts.append((step, row, count))
                kept.num_tokens += count
                row += count
        self.num_tokens += num_rows
        self._num_rows += num_rows

    def take(self, requests: Sequence[Request]) -> Observation | None:
        """Remove the stored hidden states of these requests and return them as one observation; None if nothing is
        stored. The token after the stored ones must be known."""
        taken = [kept for request in requests if (kept := self._kept.get(request.id)) is not None]
        if not taken:
            return None
        counts = [kept.num_tokens for kept in taken]
        offsets = tuple(accumulate(counts, initial=0))
        ends = [kept.start + kept.num_tokens for kept in taken]
        token_ids = np.concatenate(
            [kept.request.token_ids[kept.start : end] for kept, end in zip(taken, ends, strict=True)]
        )
        positions = np.concatenate([np.arange(kept.start, end) for kept, end in zip(taken, ends, strict=True)])
        following = [int(kept.request.token_ids[end]) for kept, end in zip(taken, ends, strict=True)]
        taps = taken[0].parts[0][0].features
        features = {tap: torch.cat([part for kept in taken for part in kept.features(tap)]) for tap in taps}
        device = self._device
        for kept in taken:
            self.drop(kept.request)
        return Observation(
            requests=tuple(kept.request for kept in taken),
            starts=tuple(kept.start for kept in taken),
            offsets=offsets,
            num_valid=torch.tensor(counts, dtype=torch.int32, device=device),
            last_rows=torch.tensor(offsets[1:], device=device) - 1,
            host_num_valid=tuple(counts),
            token_ids=torch.from_numpy(token_ids).to(device),
            positions=torch.from_numpy(positions).to(device),
            features=features,
            next_token_ids=torch.tensor(following, device=device),
        )

    def drop(self, request: Request) -> None:
        """Forget what is stored of a request."""
        kept = self._kept.pop(request.id, None)
        if kept is None:
            return
        self.num_tokens -= kept.num_tokens
        for step, _, number in kept.parts:
            step.num_live -= number
            if not step.num_live:
                self._num_rows -= step.num_rows
        if self._num_rows > 2 * self.num_tokens:
            self._compact()

    def largest(self) -> Request:
        """The request with the most stored tokens."""
        return max(self._kept.values(), key=lambda kept: kept.num_tokens).request

    def _compact(self) -> None:
        """Copy what is stored, so that no row of another request is kept in memory."""
        for kept in self._kept.values():
            taps = kept.parts[0][0].features
            step = _Step({tap: torch.cat(kept.features(tap)) for tap in taps}, kept.num_tokens, kept.num_tokens)
            kept.parts = [(step, 0, kept.num_tokens)]
        self._num_rows = self.num_tokens
