"""Which observations a proposer gets, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import Observation, Plan
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.arrears import Arrears
from specdec_core.engine.named_proposer import NamedProposer
from specdec_core.engine.observation import observation_of
from specdec_core.engine.request import Request
from specdec_core.engine.runner import Computed
from specdec_core.engine.scheduler import Schedule


class Observer:
    """Shows a proposer what was computed: at once for requests that draft, late for those that do not.

    A request is *off* while it is not worth drafting for. Its tokens and features are kept then, as many as max_tokens
    of all requests together, and handed over before its next draft. Beyond that, the request with the most is observed
    now if `pays` says so; else what it has is dropped, and the proposer drafts for it no more until it is admitted
    again.

    is_off, pays: set by whoever decides that. By default all requests draft.
    """

    def __init__(self, proposer: NamedProposer, plan: Plan, max_tokens: int) -> None:
        self.is_off: Callable[[Request], bool] = lambda request: False
        self.pays: Callable[[Request], bool] = lambda request: True
        self._proposer, self._plan, self._max_tokens = proposer, plan, max_tokens
        self._arrears = Arrears()
        self._lost: WeakSet[Request] = WeakSet()  # the proposer has not seen some of their tokens

    def may_draft(self, request: Request) -> bool:
        return request not in self._lost and not self.is_off(request)

    def observe(self, schedule: Schedule, computed: Computed, draft: Draft, verdict: Verdict) -> None:
        """After a forward pass. The verdict is on the host."""
        if not self._plan.observes:
            return
        on = [i for i, request in enumerate(schedule.requests) if self.may_draft(request)]
        if on:
            self.catch_up([schedule.requests[i] for i in on])
            taps, number = self._plan.taps, self._plan.top_tokens
            self._show(observation_of(schedule, computed, draft, verdict, on, taps, number))
        if len(on) < len(schedule.requests):
            off = [i for i, r in enumerate(schedule.requests) if self.is_off(r) and r not in self._lost]
            self._put_off(schedule, computed, draft, verdict, off)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Hand over what was put off of these requests."""
        if self._arrears.num_tokens and (late := self._arrears.take(requests)) is not None:
            self._show(late)

    def forget(self, request: Request) -> None:
        """It is over, or starts over."""
        self._arrears.drop(request)
        self._lost.discard(request)

    def _show(self, observation: Observation) -> None:
        with self._proposer.called() as proposer:
            proposer.observe(observation)

    def _put_off(
        self, schedule: Schedule, computed: Computed, draft: Draft, verdict: Verdict, off: Sequence[int]
    ) -> None:
        requests = [schedule.requests[i] for i in off]
        self._arrears.keep(requests, observation_of(schedule, computed, draft, verdict, off, self._plan.taps))
        while self._arrears.num_tokens > self._max_tokens:
            most = self._arrears.largest()
            if self.pays(most):
                self.catch_up([most])
            else:
                self._arrears.drop(most)
                self._lost.add(most)
