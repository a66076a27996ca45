"""Decides when a proposer sees the target's hidden states (an observation): after a forward pass, or later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
import torch

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import Observation, Plan
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.arrears import Arrears, Features
from specdec_core.engine.named_proposer import NamedProposer
from specdec_core.engine.observation import final_counts, final_rows, observation_of
from specdec_core.engine.request import Request
from specdec_core.engine.runner import Computed
from specdec_core.engine.scheduler import Schedule
from specdec_core.ops.top_tokens import MostLikely, most_likely
from specdec_core.ops.upload import upload


class _Stored(NamedTuple):
    """What `Observer.put_off` stores of a forward pass: the last tokens of some requests."""

    requests: Sequence[Request]
    counts: list[int]  # of each request: 1 or 0
    number: int
    rows: torch.Tensor | None  # int64 [number]   None: the first ones; what follows is padding


NOTHING = _Stored([], [], 0, None)


class Observer:
    """Passes the target's hidden states to a proposer: at once for requests that draft, late for those that do not.

    is_off: a function of a request that returns whether drafting is turned off for it. Its hidden states are then
        stored until just before its next draft. The default returns False; assign another function to turn drafting
        off.
    max_tokens: when more tokens would be stored, the hidden states of the request with the most are dropped, and it
        gets no drafts until it is preempted and starts over.
    most_each: the same for the tokens of one request. No late observation has more tokens, either.
    most_likely: the operation of this name.

    The proposer never sees requests that ask for no drafts, or only for those of other methods.
    """

    def __init__(
        self,
        proposer: NamedProposer,
        plan: Plan,
        max_tokens: int,
        most_each: int,
        device: torch.device,
        most_likely: MostLikely = most_likely,
    ) -> None:
        self.is_off: Callable[[Request], bool] = lambda request: False
        self._proposer, self._plan, self._max_tokens, self._most_each = proposer, plan, max_tokens, most_each
        self._most_likely = most_likely
        self._room = most_each  # at least as many more tokens can be stored of each request
        self._device, self._arrears = device, Arrears(device)
        self._lost: WeakSet[Request] = WeakSet()  # the proposer has not seen some of their tokens
        self._last, self._num_alike = NOTHING, 0  # the number of further steps for which it holds

    def may_draft(self, request: Request) -> bool:
        """Whether the proposer may draft for a request now."""
        return self.may_ever_draft(request) and not self.is_off(request)

    def observe(
        self, schedule: Schedule, computed: Computed, draft: Draft, asked: Sequence[Request], verdict: Verdict
    ) -> int:
        """Pass the hidden states of a forward pass (`computed`) to the proposer, or store them for later. Returns the
        number of requests that the proposer saw.

        draft: of all proposers. asked: the requests that this proposer was asked to draft for in this step, though its
            draft tokens may have been cut. verdict: the result of verification, on the host.
        """
        self._last = NOTHING
        if not self._plan.observes:
            return 0
        wanted = [i for i, request in enumerate(schedule.requests) if self.may_ever_draft(request)]
        # A request for which it drafted is observed at once, even if its drafting has been turned off since: what the
        # proposer has stored of the draft tokens is settled by their verdict.
        drafted_for = {id(request) for request in asked}
        on = [i for i in wanted if id(request := schedule.requests[i]) in drafted_for or not self.is_off(request)]
        if on:
            self.catch_up([schedule.requests[i] for i in on])
            taps, number = self._plan.taps, self._plan.top_tokens
            self._show(observation_of(schedule, computed, draft, verdict, on, taps, number, self._most_likely))
        if len(on) < len(wanted):
            shown = set(on)
            off = [i for i in wanted if i not in shown]
            is_sound, accepted = verdict.token_ids.numpy()[:, 0] >= 0, verdict.num_accepted.numpy()
            counts = np.where(is_sound, np.asarray(schedule.num_known) + accepted, 0)[off].tolist()
            self._put_off(schedule, computed, draft, verdict, off, counts)
        return len(on)

    def put_off(self, schedule: Schedule, computed: Computed, draft: Draft, verdict: Verdict) -> None:
        """Store the hidden states of a forward pass without prefill, for which this proposer was not asked, since
        drafting was turned off for all requests. The short way of `observe`."""
        if not self._plan.observes:
            return
        last, most = self._stored_of(schedule.requests), 1 + draft.max_depth
        self._num_alike -= most
        if not self._has_room(last.number * most, most):
            counts = (final_counts(verdict) * np.array(last.counts)).tolist()
            self._put_off(schedule, computed, draft, verdict, range(len(counts)), counts)
        elif last.number:
            self._arrears.keep_accepted(last.requests, last.counts, verdict, self._tapped(computed.features))
            self._room -= most

    def num_alike(self, requests: Sequence[Request]) -> int:
        """For how many steps the hidden states of each of these requests are stored, or are not stored, as in the next
        one, if no request drafts or ends and no other one starts. 0: not even in the next one."""
        if not self._plan.observes:
            return sys.maxsize
        last = self._stored_of(requests)
        if not last.number:
            return self._num_alike
        return min(self._num_alike, self._room, (self._max_tokens - self._arrears.num_tokens) // last.number)

    def put_off_plain(self, requests: Sequence[Request], starts: Sequence[int], passes: Sequence[Features]) -> None:
        """Store the hidden states of forward passes with the last token of each request and nothing else.

        starts: the position of that token in the first of them. passes: [at most `num_alike`], of each forward pass its
            hidden states {tap: [num_tokens, width]}.
        """
        if not self._plan.observes:
            return
        last = self._stored_of(requests)
        if last.number:
            if last.rows is not None:
                rows = upload(last.rows, self._device)
                passes = [{tap: each[tap][rows] for tap in self._plan.taps} for each in passes]
            self._arrears.keep(last.requests, last.counts, [*map(self._tapped, passes)], starts)
            self._room -= len(passes)
        self._num_alike -= len(passes)

    def _stored_of(self, requests: Sequence[Request]) -> _Stored:
        if requests != self._last.requests or self._num_alike <= 0:
            self._last = self._found_stored_of(requests)
        return self._last

    def _found_stored_of(self, requests: Sequence[Request]) -> _Stored:
        counts = [int(self.may_ever_draft(request)) for request in requests]
        rows = None if all(counts) else torch.tensor(counts).nonzero().flatten()
        longest = self._plan.max_model_len or sys.maxsize
        stored = (request for request, count in zip(requests, counts, strict=True) if count)
        self._num_alike = min((longest - request.num_tokens for request in stored), default=sys.maxsize)
        return _Stored(requests, counts, sum(counts), rows)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Show the proposer the stored hidden states of these requests, which are then no longer stored."""
        if not self._arrears.num_tokens:
            return
        together: list[Request] = []
        num_tokens = 0
        for request in requests:
            number = self._arrears.number_of(request)
            if number and num_tokens + number > self._most_each:
                self._show_late(together)
                together, num_tokens = [], 0
            if number:
                together.append(request)
                num_tokens += number
        self._show_late(together)

    def begin(self, request: Request, *, is_whole: bool) -> None:
        """Note that a request starts, or starts over. is_whole: whether the proposer sees, or has cached, all of its
        tokens."""
        (self._lost.discard if is_whole else self._lost.add)(request)

    def forget(self, request: Request) -> None:
        """Drop the stored hidden states of a request that has ended or starts over."""
        self._arrears.drop(request)
        self._lost.discard(request)
        self._last = NOTHING

    def _show_late(self, requests: Sequence[Request]) -> None:
        if (late := self._arrears.take(requests)) is not None:
            self._show(late)

    def _show(self, observation: Observation) -> None:
        with self._proposer.called() as proposer:
            proposer.observe(observation)

    def may_ever_draft(self, request: Request) -> bool:
        """Whether the proposer may draft for a request, at once or after a late observation."""
        longest = self._plan.max_model_len
        is_short = longest is None or request.num_tokens < longest
        if self._plan.reads_prediction and not len(request.prediction):
            return False
        return is_short and request.may_draft and request.may_use(self._proposer.name) and not self.is_lost(request)

    def is_lost(self, request: Request) -> bool:
        """Whether hidden states of the request were dropped, so that it does not draft until it starts over."""
        return request in self._lost

    def _put_off(
        self,
        schedule: Schedule,
        computed: Computed,
        draft: Draft,
        verdict: Verdict,
        off: Sequence[int],
        counts: list[int],
    ) -> None:
        """Store the hidden states of the requests with these indices, for which this proposer did not draft: of the
        first `counts` tokens of each that are final."""
        requests, most = [schedule.requests[i] for i in off], max(counts, default=0)
        if not self._has_room(sum(counts), most):
            self._make_room(dict(zip(requests, counts, strict=True)))
        self._room -= most
        pairs = zip(requests, counts, strict=True)
        counts = [count if self.may_ever_draft(request) else 0 for request, count in pairs]
        if not any(counts):
            return
        features = self._tapped(computed.features)
        if draft.num_nodes or counts != schedule.num_known:  # else the first rows: nothing to copy
            numbers = final_rows(schedule, computed, verdict, np.asarray(off), np.asarray(counts))
            rows = upload(numbers, computed.batch.token_ids.device)
            features = {tap: each.index_select(0, rows) for tap, each in features.items()}
        self._arrears.keep(requests, counts, [features])

    def _tapped(self, features: Features) -> Features:
        taps = self._plan.taps
        return features if len(features) == len(taps) else {tap: features[tap] for tap in taps}

    def _has_room(self, number: int, most: int) -> bool:
        """Whether so many more tokens can be stored, `most` of them of one request."""
        return most <= self._room and self._arrears.num_tokens + number <= self._max_tokens

    def _make_room(self, added: dict[Request, int]) -> None:
        """Drop what is stored of the requests that would have the most tokens, until no more than max_tokens are stored
        with `added`, {request: number of tokens}, and no more than most_each of one request."""
        numbers = self._arrears.counts()
        for request, number in added.items():
            numbers[request] = numbers.get(request, 0) + number
        num_tokens = sum(numbers.values())
        while numbers:
            most = max(numbers, key=numbers.__getitem__)
            if num_tokens <= self._max_tokens and numbers[most] <= self._most_each:
                break
            num_tokens -= numbers.pop(most)
            self._arrears.drop(most)
            self._lost.add(most)
        self._last = NOTHING
        self._room = self._most_each - max((numbers[each] - added.get(each, 0) for each in numbers), default=0)
