"""Decides which requests the next forward pass computes, how many of their tokens, and how many draft tokens they get.

A forward pass has at most `max_num_batched_tokens` tokens; longer prompts are computed in chunks. Prompt and output
tokens come first, those of running requests before those of waiting ones. Draft tokens share what is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from numbers import Integral
from typing import Protocol

import numpy as np
from attrs import define, field

from specdec_core.config.fields import shown
from specdec_core.contracts.kv import KVManager
from specdec_core.engine.draft_limits import DraftLimit, deal
from specdec_core.engine.request import Request
from specdec_core.errors import CapacityError, PluginError


@define
class Schedule:
    """The work of one forward pass. requests, num_known and budgets have one entry per request.

    num_known: how many of the request's prompt or output tokens to compute, from index num_computed on.
    budgets: the most draft tokens that the request may have (max_draft_tokens).
    preempted: requests that were running, lost their KV blocks in this step and start over later.
    """

    requests: list[Request] = field(factory=list)
    request_ids: list[str] = field(factory=list)
    num_known: list[int] = field(factory=list)
    budgets: list[int] = field(factory=list)
    preempted: list[Request] = field(factory=list)
    num_prefill_tokens: int = 0  # known tokens, without the roots of decoding requests
    num_prompt_tokens: int = 0  # of these, tokens of prompts
    num_decode_requests: int = 0  # requests whose only known token is the root
    num_queried_tokens: int = 0  # of the requests that were admitted: looked up in the prefix cache
    num_cached_tokens: int = 0  # of these, found

    def add(self, request: Request, num_known: int) -> None:
        self.requests.append(request)
        self.request_ids.append(request.id)
        self.num_known.append(num_known)
        self.budgets.append(0)
        if request.is_decoding:
            self.num_decode_requests += 1
        else:
            self.num_prefill_tokens += num_known
            self.num_prompt_tokens += min(num_known, max(0, request.num_prompt_tokens - request.num_computed))

    @property
    def whole_requests(self) -> list[Request | None]:
        """The scheduled requests, in order. None in place of a request that gets no output token in this step, because
        part of its prefill is left for later steps (chunked prefill)."""
        pairs = zip(self.requests, self.num_known, strict=True)
        return [request if num_known == request.num_pending else None for request, num_known in pairs]


class Drafting(Protocol):
    """What the scheduler asks about drafts. `Speculation` implements it."""

    def is_idle(self, requests: Sequence[Request], *, is_prefill: bool) -> bool:
        """Whether none of these requests drafts in this step. is_prefill: whether the step has prefill tokens."""

    def groups_of(self, request: Request) -> list[int]:
        """The KV cache's groups of drafts that must have a cached token of this request, beside the target's."""

    def admitted(self, request: Request, num_cached: int) -> None:
        """Note that a request starts, or starts over, with so many cached tokens."""


class Scheduler:
    """Schedules requests in the order in which they came, running requests before waiting ones, and then their drafts.
    Drafts only get tokens and KV blocks that no scheduled request needs for its known tokens. When KV blocks run out
    even so, the youngest request is preempted. It starts over, with its output so far as part of its prefill.

    So every running request computes a token or more in each step: at most one of them, the youngest, has a prefill to
    do, since none is admitted after it until its prefill is complete.

    limit: decides the most draft tokens of a request.
    scratch_slots: the number of KV-cache slots per request that a proposer may overwrite while it drafts. The first is
        the slot of the root (the request's last token).
    """

    def __init__(
        self,
        kv: KVManager,
        limit: DraftLimit,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
        scratch_slots: int,
        drafting: Drafting,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._kv = kv
        self._limit = limit
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_size = block_size
        self._scratch_slots = scratch_slots
        self._drafting = drafting
        self._stuck: tuple[str, int] | None = None  # a request that did not fit, with so many free blocks
        self._turns = count()

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def remove(self, request: Request) -> None:
        """Forget a request that finished or was cancelled, and free its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._kv.release(request.id)

    def preempt(self, request: Request) -> None:
        """Free a running request's KV blocks and put it first among the waiting requests; it starts over."""
        self._evict(request)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def schedule(self) -> Schedule:
        """Select the requests of the next forward pass and reserve KV-cache slots for their tokens and drafts,
        preempting requests if necessary. Called before drafting. Raises PluginError if no request is running and the
        first waiting request does not fit."""
        schedule = Schedule()
        room = self._max_num_batched_tokens
        for request in list(self.running):
            if room and request not in schedule.preempted:
                room -= self._extend(request, room, schedule)
        num_running = len(self.running)
        if not schedule.preempted:
            room -= self._admit(room, schedule)
        self._deal_drafts(room, num_running, schedule)
        if self.waiting and not self.running and not schedule.preempted:
            raise PluginError(
                f"{type(self._kv).__name__} has {self._kv.num_free_blocks} free blocks while no request runs, and the "
                f"next one, of {self.waiting[0].num_tokens} tokens, does not fit: give more num_kv_blocks, or report "
                f"this to its author"
            )
        return schedule

    def _extend(self, request: Request, room: int, schedule: Schedule) -> int:
        """Schedule a running request's next tokens: a chunk of its prefill, or its last token. If KV blocks run out,
        the last running requests are preempted, it may be this one. Returns how many tokens of the forward pass it
        takes, at most `room`; 0 if it was preempted itself."""
        num_known = min(request.num_pending, room)
        while not self._reserve(request, num_known, 0):
            victim = self.running[-1]
            self.preempt(victim)
            schedule.preempted.append(victim)
            if victim is request:
                return 0
        schedule.add(request, num_known)
        return num_known

    def _admit(self, room: int, schedule: Schedule) -> int:
        """Schedule waiting requests while there are seats, tokens and KV blocks for the first of them. Returns how many
        tokens of the forward pass they take, at most `room`."""
        left = room
        while self.waiting and left and len(self.running) < self._max_num_seqs and self._kv.num_free_blocks:
            request, num_free = self.waiting[0], self._kv.num_free_blocks
            if self._stuck is not None and request.id == self._stuck[0] and num_free <= self._stuck[1]:
                break
            try:
                token_ids = request.reusable_token_ids
                request.num_cached_tokens = request.num_computed = self._cached(request, token_ids)
                num_known = min(request.num_pending, left)
                # All of its known tokens must fit, though only a chunk is computed now: else it would be preempted at
                # once.
                has_room = self._kv.num_free_blocks * self._block_size > request.num_pending
                if not has_room or not self._reserve(request, num_known, 0):
                    self._evict(request)
                    self._stuck = request.id, num_free
                    break
                self._stuck = None
                self.running.append(self.waiting.popleft())
            except BaseException:  # an interrupt (Ctrl-C), too: it goes on waiting, with nothing in the KV cache
                if request not in self.running:
                    self._evict(request)
                raise
            schedule.add(request, num_known)
            schedule.num_queried_tokens += len(token_ids)
            schedule.num_cached_tokens += request.num_cached_tokens
            request.draft_turn = next(self._turns)
            left -= num_known
        return room - left

    def _deal_drafts(self, room: int, num_running: int, schedule: Schedule) -> None:
        """Set the scheduled requests' budgets: deal out `room` draft tokens evenly, and reserve their slots. A request
        whose draft finds too few free KV blocks gets none. Those that got more than others come last next time."""
        if self._drafting.is_idle(schedule.requests, is_prefill=schedule.num_prefill_tokens > 0):
            return
        wanted = [self._limit(request, num_running) for request in schedule.requests]
        drafting = [i for i, number in enumerate(wanted) if number]
        drafting.sort(key=lambda i: schedule.requests[i].draft_turn)
        for i, share in zip(drafting, deal([wanted[i] for i in drafting], room), strict=True):
            if share and self._reserve(schedule.requests[i], schedule.num_known[i], share):
                schedule.budgets[i] = share
        most = max(schedule.budgets, default=0)
        favored = [i for i in drafting if schedule.budgets[i] >= min(wanted[i], most)]
        if len(favored) < len(drafting):
            for i in favored:
                schedule.requests[i].draft_turn = next(self._turns)

    def _cached(self, request: Request, token_ids: np.ndarray) -> int:
        """Register a request with the KV manager and return how many of these tokens of it are in the prefix cache.
        Raises PluginError if the number that the KV manager returns is impossible."""
        found = self._kv.admit(request.id, token_ids, request.cache_salt, self._drafting.groups_of(request))
        if not isinstance(found, Integral) or found % self._block_size or not 0 <= found <= max(0, len(token_ids) - 1):
            raise PluginError(
                f"{type(self._kv).__name__}.admit returned {shown(found)} for {len(token_ids)} tokens: allowed are "
                f"whole blocks of {self._block_size}, and fewer tokens than there are. Report this to its author"
            )
        self._drafting.admitted(request, found)
        return found

    def _evict(self, request: Request) -> None:
        """Free a request's keys and values; it starts over when it is admitted again."""
        self._kv.release(request.id)
        request.num_cached_tokens = request.num_computed = 0

    def _reserve(self, request: Request, num_known: int, budget: int) -> bool:
        scratch = max(budget, self._scratch_slots - 1) if budget else 0
        try:
            self._kv.reserve(request.id, request.num_computed + num_known, scratch)
        except CapacityError:
            return False
        return True
