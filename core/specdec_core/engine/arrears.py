"""Stores the target's hidden states of requests that do not draft, until a proposer sees them (a late observation)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from attrs import define, field

from specdec_core.contracts.proposer import Observation
from specdec_core.engine.request import Request

Features = Mapping[str, torch.Tensor]
"""{tap: [num_rows, width]}."""


@define(eq=False)
class _Segment:
    """The hidden states of consecutive forward passes, in each of which the same requests had the same numbers of
    tokens (`counts`)."""

    requests: Sequence[Request]
    counts: Sequence[int]
    starts: Sequence[int]  # each request's first position
    num_live: int  # rows of a forward pass whose requests are still stored
    steps: list[Features] = field(factory=list)

    @property
    def num_rows(self) -> int:
        return sum(self.counts) * len(self.steps)

    def features(self, i: int, tap: str) -> torch.Tensor:
        """[num_tokens, width]   those of the request at index i."""
        start, end = sum(self.counts[:i]), sum(self.counts[: i + 1])
        return torch.cat([step[tap][start:end] for step in self.steps])


class Arrears:
    """Stores hidden states until the proposer sees them in a late observation.

    Storing is cheap, since a request that does not draft should cost little more than in plain decoding: nothing is
    copied, and as long as the requests stay the same, a forward pass is only added to a list. Once more than half of
    all stored rows are of requests that are gone, the others get copies of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._places: dict[str, list[tuple[_Segment, int]]] = {}  # of each request: its segments, and index in them
        self._open: _Segment | None = None  # the newest segment; None: some of its requests are gone
        self._device = device
        self.num_tokens = 0  # of all requests
        self._num_rows = 0  # that are in memory

    def __contains__(self, request: Request) -> bool:
        return request.id in self._places

    def keep(self, requests: Sequence[Request], counts: Sequence[int], features: Features) -> None:
        """Store the hidden states of a forward pass, from position `num_computed` of each request on.

        counts: [n], the number of tokens of each request; 0: nothing is stored for it.
        features: {tap: [sum(counts), width]}, which are not written to afterwards.
        """
        segment = self._open
        if segment is None or segment.requests != requests or segment.counts != counts:
            segment = self._open = self._begin(requests, counts)
        segment.steps.append(features)
        self.num_tokens += segment.num_live
        self._num_rows += segment.num_live

    def _begin(self, requests: Sequence[Request], counts: Sequence[int]) -> _Segment:
        starts = [request.num_computed for request in requests]
        segment = _Segment(list(requests), list(counts), starts, num_live=sum(counts))
        for i, (request, count) in enumerate(zip(requests, counts, strict=True)):
            if count:
                self._places.setdefault(request.id, []).append((segment, i))
        return segment

    def take(self, requests: Sequence[Request]) -> Observation | None:
        """Remove the stored hidden states of these requests and return them as one observation; None if nothing is
        stored. The token after the stored ones must be known."""
        taken = [request for request in requests if request in self]
        if not taken:
            return None
        places = [self._places[request.id] for request in taken]
        counts = [self._num_tokens(request.id) for request in taken]
        starts = [segment.starts[i] for (segment, i), *_ in places]
        offsets = tuple(accumulate(counts, initial=0))
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        token_ids = np.concatenate([r.token_ids[start:end] for r, start, end in zip(taken, starts, ends, strict=True)])
        positions = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        following = [int(request.token_ids[end]) for request, end in zip(taken, ends, strict=True)]
        features = {
            tap: torch.cat([segment.features(i, tap) for of_one in places for segment, i in of_one])
            for tap in places[0][0][0].steps[0]
        }
        device = self._device
        for request in taken:
            self.drop(request)
        return Observation(
            requests=tuple(taken),
            starts=tuple(starts),
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
        for segment, i in self._places.pop(request.id, ()):
            self.num_tokens -= segment.counts[i] * len(segment.steps)
            segment.num_live -= segment.counts[i]
            if not segment.num_live:
                self._num_rows -= segment.num_rows
            if segment is self._open:
                self._open = None
        if self._num_rows > 2 * self.num_tokens:
            self._compact()

    def largest(self) -> Request:
        """The request with the most stored tokens."""
        (segment, i), *_ = self._places[max(self._places, key=self._num_tokens)]
        return segment.requests[i]

    def _num_tokens(self, request_id: str) -> int:
        return sum(segment.counts[i] * len(segment.steps) for segment, i in self._places[request_id])

    def _compact(self) -> None:
        """Copy what is stored, so that no row of another request is kept in memory."""
        for request_id, places in self._places.items():
            (first, i), *_ = places
            count = self._num_tokens(request_id)
            features = {tap: torch.cat([each.features(j, tap) for each, j in places]) for tap in first.steps[0]}
            one = _Segment([first.requests[i]], [count], [first.starts[i]], count, [features])
            self._places[request_id] = [(one, 0)]
        self._open, self._num_rows = None, self.num_tokens
