"""Stores the target's hidden states of requests that do not draft, until a proposer sees them (a late observation)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from attrs import define, field

from specdec_core.contracts.proposer import Observation
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.observation import final_counts
from specdec_core.engine.request import Request
from specdec_core.ops.upload import upload

Features = Mapping[str, torch.Tensor]
"""{tap: [num_rows, width]}."""

NUM_AT_ONCE = 64
"""Forward passes after which the padding of their hidden states is dropped."""
NUM_GATHERED, MOST_GATHERED = 16, 1024
"""Forward passes with drafts, and rows of these, after which those of accepted tokens are copied."""


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

    def split(self, tap: str) -> list[torch.Tensor]:
        """Those of each request, [num_tokens, width]."""
        number = sum(self.counts)
        of_steps = torch.stack([step[tap][:number] for step in self.steps])
        ends = accumulate(self.counts)
        return [of_steps[:, end - count : end].flatten(0, 1) for end, count in zip(ends, self.counts, strict=True)]

    @property
    def is_padded(self) -> bool:
        """Whether the newest forward pass has rows of padding."""
        return bool(self.steps) and any(len(each) > sum(self.counts) for each in self.steps[-1].values())

    def drop_padding(self) -> None:
        """Keep only the tokens' rows of the steps since it was called last: one copy for all, since one for each is
        slow."""
        number, last = sum(self.counts), self.steps[-((len(self.steps) - 1) % NUM_AT_ONCE + 1) :]
        of_steps = {tap: torch.stack([step[tap][:number] for step in last]) for tap in last[0]}
        self.steps[-len(last) :] = [{tap: each[j] for tap, each in of_steps.items()} for j in range(len(last))]


@define(eq=False)
class _Waiting:
    """Forward passes with drafts, of the same requests, of which the accepted tokens' rows are to be copied. wanted: 1
    or 0 for each request; of those with 0, nothing is stored."""

    requests: Sequence[Request]
    wanted: Sequence[int]
    starts: Sequence[int]  # each request's first position
    passes: list[tuple[Verdict, Features]] = field(factory=list)
    most_tokens: int = 0  # that may be stored
    num_rows: int = 0  # in memory

    def add(self, verdict: Verdict, features: Features) -> int:
        """Returns how many tokens it has at most."""
        self.passes.append((verdict, features))
        more = verdict.token_ids.shape[1] * sum(self.wanted)
        self.most_tokens += more
        self.num_rows += len(next(iter(features.values()), ()))
        return more

    @property
    def is_full(self) -> bool:
        return len(self.passes) == NUM_GATHERED or self.num_rows > MOST_GATHERED

    def gathered(self, device: torch.device) -> tuple[list[int], Features]:
        """The number of tokens of each request, and {tap: [num_tokens, width]}, one request after the other."""
        wanted = np.array(self.wanted)
        counts = [final_counts(verdict) * wanted for verdict, _ in self.passes]
        rows, above = [], 0
        for count, (verdict, features) in zip(counts, self.passes, strict=True):
            decided_at = verdict.rows.numpy()  # rows of logits are those of tokens, since there was no prefill
            rows.append(above + decided_at[np.arange(decided_at.shape[1]) < count[:, None]])
            above += len(next(iter(features.values()), ()))
        owners = np.concatenate([np.arange(len(count)).repeat(count) for count in counts])
        index = upload(np.concatenate(rows)[owners.argsort(kind="stable")], device)
        of_passes = [features for _, features in self.passes]
        found = {tap: torch.cat([each[tap] for each in of_passes]).index_select(0, index) for tap in of_passes[0]}
        return np.sum(counts, axis=0).tolist(), found


class Arrears:
    """Stores hidden states until the proposer sees them in a late observation.

    Storing is cheap, since a request that does not draft should cost little more than in plain decoding: as long as the
    requests stay the same, a forward pass is only added to a list. Padding is dropped now and then. Where more than
    half of all stored rows are of requests that are gone, the others get copies of their own when the next rows are
    stored: not at once, since requests of a batch may all end in the same step.
    """

    def __init__(self, device: torch.device) -> None:
        self._places: dict[str, list[tuple[_Segment, int]]] = {}  # of each request: its segments, and index in them
        self._open: _Segment | None = None  # the newest segment; None: some of its requests are gone
        self._waiting: _Waiting | None = None  # newer than all segments
        self._device = device
        self.num_tokens = 0  # of all requests
        self._num_rows = 0  # that are in memory

    def __contains__(self, request: Request) -> bool:
        self._gather()
        return request.id in self._places

    def keep(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        passes: Sequence[Features],
        starts: Sequence[int] | None = None,
    ) -> None:
        """Store the hidden states of forward passes in a row, with the same number of tokens in each.

        counts: [n], the number of tokens of each request; 0: nothing is stored for it.
        passes: of each {tap: [sum(counts) or more, width]}, which are not written to afterwards. What follows the
            tokens is padding.
        starts: [n], the position of each request's first token in the first of them; None: its `num_computed`.
        """
        self._gather()
        for features in passes:
            self._add(requests, counts, features, starts)

    def keep_accepted(
        self, requests: Sequence[Request], wanted: Sequence[int], verdict: Verdict, features: Features
    ) -> None:
        """Store the hidden states of each request's root and accepted draft tokens, as `keep` does with the first
        tokens, of a forward pass without prefill. They are copied later, those of several forward passes at once.

        wanted: 1 or 0 for each request; of those with 0, nothing is stored. verdict: on the host.
        """
        waiting = self._waiting
        if waiting is None or waiting.requests != requests or waiting.wanted != wanted:
            self._gather()
            starts = [request.num_computed for request in requests]
            waiting = self._waiting = _Waiting(list(requests), list(wanted), starts)
        self.num_tokens += waiting.add(verdict, features)
        if waiting.is_full:
            self._gather()

    def _gather(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self.num_tokens -= waiting.most_tokens
            counts, features = waiting.gathered(self._device)
            self._add(waiting.requests, counts, features, waiting.starts)

    def _add(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        features: Features,
        starts: Sequence[int] | None = None,  # None: where the requests are now
    ) -> None:
        segment = self._open
        if segment is None or segment.requests != requests or segment.counts != counts:
            if segment is not None and segment.is_padded:
                segment.drop_padding()
            segment = self._open = self._begin(requests, counts, starts)
        segment.steps.append(features)
        if len(segment.steps) % NUM_AT_ONCE == 0 and segment.is_padded:
            segment.drop_padding()
        self.num_tokens += segment.num_live
        self._num_rows += segment.num_live

    def _begin(self, requests: Sequence[Request], counts: Sequence[int], starts: Sequence[int] | None) -> _Segment:
        self._compact()
        if starts is None:
            starts = [request.num_computed for request in requests]
        segment = _Segment(list(requests), list(counts), list(starts), num_live=sum(counts))
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
        features = {tap: torch.cat(of_each) for tap, of_each in _features(places).items()}
        device = self._device
        for request in taken:
            self._remove(request)
        self._compact()
        return Observation(
            requests=tuple(taken),
            starts=tuple(starts),
            offsets=offsets,
            num_valid=upload(counts, device, dtype=torch.int32),
            last_rows=upload(offsets[1:], device) - 1,
            host_num_valid=tuple(counts),
            token_ids=upload(token_ids, device),
            positions=upload(positions, device),
            features=features,
            next_token_ids=upload(following, device),
        )

    def drop(self, request: Request) -> None:
        """Forget what is stored of a request."""
        self._gather()
        self._remove(request)

    def number_of(self, request: Request) -> int:
        """The number of stored tokens of a request."""
        return self._num_tokens(request.id) if request in self else 0

    def counts(self) -> dict[Request, int]:
        """The number of stored tokens of each request."""
        self._gather()
        first = {request_id: places[0] for request_id, places in self._places.items()}
        return {segment.requests[i]: self._num_tokens(request_id) for request_id, (segment, i) in first.items()}

    def _remove(self, request: Request) -> None:
        for segment, i in self._places.pop(request.id, ()):
            self.num_tokens -= segment.counts[i] * len(segment.steps)
            segment.num_live -= segment.counts[i]
            if not segment.num_live:
                self._num_rows -= segment.num_rows
            if segment is self._open:
                self._open = None
        if not self._places:  # an interrupt may have left other numbers
            self._open, self.num_tokens, self._num_rows = None, 0, 0

    def _num_tokens(self, request_id: str) -> int:
        return sum(segment.counts[i] * len(segment.steps) for segment, i in self._places[request_id])

    def _compact(self) -> None:
        """If more than half of all rows in memory are of requests that are gone, copy the others."""
        if self._num_rows <= 2 * self.num_tokens:
            return
        features = _features(list(self._places.values()))
        for number, (request_id, places) in enumerate(self._places.items()):
            (first, i), *_ = places
            count = self._num_tokens(request_id)
            own = {tap: of_each[number] for tap, of_each in features.items()}
            one = _Segment([first.requests[i]], [count], [first.starts[i]], count, [own])
            self._places[request_id] = [(one, 0)]
        self._open, self._num_rows = None, self.num_tokens


def _features(places: Sequence[Sequence[tuple[_Segment, int]]]) -> dict[str, list[torch.Tensor]]:
    """Return what is stored of each of several requests, {tap: [[num_tokens, width] of each]}, as copies.

    places: of each request, its segments and its index in them.
    """
    segments = {id(segment): segment for of_one in places for segment, _ in of_one}
    found: dict[str, list[torch.Tensor]] = {}
    for tap in next(iter(segments.values())).steps[0] if segments else ():
        parts = {key: segment.split(tap) for key, segment in segments.items()}
        found[tap] = [torch.cat([parts[id(segment)][i] for segment, i in of_one]) for of_one in places]
    return found
