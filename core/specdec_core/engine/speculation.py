"""Calls all proposers of an engine: when requests start and end, for drafts, and with the target's hidden states."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean
from time import perf_counter

import torch

from specdec_core.budget.budget import Budget
from specdec_core.budget.choice import Expected
from specdec_core.budget.cost_curve import CostCurve
from specdec_core.budget.plain_steps import PlainSteps
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.report import StepReport
from specdec_core.contracts.verifier import Verdict
from specdec_core.drafting.combining import combine_drafts
from specdec_core.engine.device import use_device
from specdec_core.engine.drafter import Drafter
from specdec_core.engine.interrupts import then
from specdec_core.engine.loss_watch import LossWatch
from specdec_core.engine.metrics import Counter, Gauge
from specdec_core.engine.own_counts import OwnCounts, accepted_by
from specdec_core.engine.request import Request
from specdec_core.engine.rest import LEAST_STEPS, Rest
from specdec_core.engine.runner import Computed
from specdec_core.engine.scheduler import Schedule
from specdec_core.errors import PluginError
from specdec_core.plugins import PluginWarning


class Speculation:
    """Calls an engine's proposers and combines their drafts.

    drafters: one per proposer; empty for plain decoding.
    curve: the measured time of a step but for drafting, which the drafters' budgets share; None: there is no budget.
    watch: warns if drafting is a loss, where there is no budget.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        device: torch.device,
        curve: CostCurve | None = None,
        watch: LossWatch | None = None,
    ) -> None:
        self.drafters, self._device, self._curve, self._watch = tuple(drafters), device, curve, watch
        # By the number of requests: made once, since each step has one.
        self._empty_drafts: dict[int, Draft] = {}
        self._plain: dict[int, Expected] = {}
        self._is_idle = False  # in this step
        self._rest: Rest | None = None  # of which this step is one
        self._plain_steps = None if curve is None else PlainSteps(curve)
        self._num_plain = 0  # steps since a proposer was last asked for drafts
        self._num_tokens = self._num_alike = 0  # of the last step; and how many steps had as many; 0: with prefill
        self._own_drafts: dict[str, Draft | None] = {}  # of this step, by the proposer's name
        self._own_counts = OwnCounts()
        self._own_s = self._ended_s = 0.0  # what `propose` took here, without proposers, and the last `end_step`
        self._unsaved: list[float] = []  # seconds of steps that the budgets do not know of yet
        self._started: set[Request] = set()

    def is_idle(self, requests: Sequence[Request], *, is_prefill: bool) -> bool:
        """Whether it was decided in earlier steps that none of the scheduled requests drafts in this one. Always, if
        there is no proposer. Called before the other methods in each step."""
        if self._rest is not None and not is_prefill and self._rest.goes_on(requests):
            return True
        self._end_rest()
        self._is_idle = False
        if not all(drafter.stays_idle(requests, is_prefill=is_prefill) for drafter in self.drafters):
            return False
        for drafter in self.drafters:
            drafter.pass_step()
        self._is_idle = True
        if self._curve is not None and self.drafters and requests and not is_prefill:
            most_steps = min(each.most_idle_steps(requests) for each in self.drafters)
            if most_steps > 0:
                self._rest = Rest.of(requests, most_steps, self._curve.at(len(requests)))
        return True

    def _end_rest(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            for drafter in self.drafters:
                drafter.observer.put_off_plain(rest.requests, rest.starts, rest.passes)

    def groups_of(self, request: Request) -> list[int]:
        """The KV cache's groups of drafts that must have a cached token of this request: not those of methods that do
        not draft for it at present. These would cost it the target's cached tokens."""
        return [each.group for each in self.drafters if each.group is not None and each.expects(request)]

    def admitted(self, request: Request, num_cached: int) -> None:
        """Note that a request starts, or starts over, with so many cached tokens. Those that a proposer's group may
        lack are lost to it."""
        for each in self.drafters:
            is_whole = each.group is None or not num_cached or each.expects(request)
            each.observer.begin(request, is_whole=is_whole)

    def announce(self, schedule: Schedule) -> None:
        """Tell the proposers which requests were preempted, and which are scheduled for the first time."""
        for request in schedule.preempted:
            self.reset(request)
        for request in schedule.requests:
            if not request.is_started:
                self._started.add(request)
                request.is_started = True
                for drafter in self.drafters:
                    drafter.start(request)

    def propose(self, schedule: Schedule) -> Draft:
        """Return one draft over all scheduled requests, combined from the proposers' drafts."""
        if self._is_idle:
            self._own_s = 0.0
            return self._empty_draft(len(schedule.requests))
        started, drafted_s = perf_counter(), 0.0
        if self._takes_plain_step(schedule):
            self._own_drafts = {each.proposer.name: None for each in self.drafters}
            self._own_s = 0.0
            return self._empty_draft(len(schedule.requests))
        num_requests = len(schedule.requests)
        if num_requests not in self._plain:
            self._plain[num_requests] = Expected.of_plain(num_requests)
        so_far = self._plain[num_requests]
        self._own_drafts, is_beside = {}, False
        last: tuple[Budget, Draft] | None = None  # whose draft is not counted in so_far yet
        for drafter in self.drafters:
            is_prefill = schedule.num_prefill_tokens > 0
            if drafter.stays_idle(schedule.requests, is_prefill=is_prefill, is_beside=is_beside):
                drafter.pass_step()
                self._own_drafts[drafter.proposer.name] = None
                continue
            if last is not None:
                so_far, last = last[0].after(schedule.requests, last[1]), None
            asked = perf_counter()
            draft = drafter.propose(schedule, so_far)
            drafted_s += perf_counter() - asked
            self._own_drafts[drafter.proposer.name] = draft
            if drafter.budget is not None and draft is not None:
                last = drafter.budget, draft
                is_beside |= draft.num_nodes > 0
        self._own_s = perf_counter() - started - drafted_s
        drafts = [draft for draft in self._own_drafts.values() if draft is not None and draft.num_nodes]
        if not drafts:
            return self._empty_draft(num_requests)
        return drafts[0] if len(drafts) == 1 else combine_drafts(drafts, schedule.budgets)

    def _takes_plain_step(self, schedule: Schedule) -> bool:
        """Whether nothing is drafted in this step, to measure a plain one."""
        if self._watch is not None:
            return not schedule.num_prefill_tokens and self._watch.skips(schedule.num_decode_requests)
        if self._plain_steps is None:
            return False
        if schedule.num_prefill_tokens:
            self._plain_steps.break_off()
            return False
        saved_share = max((each.budget.saved_share for each in self.drafters if each.budget is not None), default=0.0)
        is_taken = self._plain_steps.takes(len(schedule.requests), saved_share)
        for drafter in self.drafters if is_taken else ():
            drafter.pass_step()
        return is_taken

    def _empty_draft(self, num_requests: int) -> Draft:
        """A draft without draft tokens."""
        if num_requests not in self._empty_drafts:
            self._empty_drafts[num_requests] = Draft.from_chains([[]] * num_requests, self._device)
        return self._empty_drafts[num_requests]

    def observe(self, schedule: Schedule, computed: Computed, draft: Draft, verdict: Verdict) -> None:
        """Pass the hidden states of a forward pass to the proposers that want them. The verdict (the result of
        verification) is on the host."""
        if self._rest is not None:
            self._rest.passes.append(computed.features)
            return
        for drafter in self.drafters:
            if drafter.is_idle and not schedule.num_prefill_tokens:
                drafter.observer.put_off(schedule, computed, draft, verdict)
            else:
                drafter.observe(schedule, computed, draft, verdict)

    @property
    def own_drafts(self) -> Mapping[str, Draft | None]:
        """{method: its own draft of this step, over all scheduled requests}. None: it has drafted nothing."""
        return {} if self._is_idle else self._own_drafts

    def accepted_by(self, verdict: Verdict) -> Mapping[str, Sequence[int]]:
        """{method: of each request of the step, how many of the first accepted draft tokens the method has drafted}.
        The verdict is on the host."""
        return accepted_by(self.own_drafts, verdict)

    def count(
        self, request_ids: Sequence[str], accepted_by: Mapping[str, Sequence[int]], accepted: Mapping[str, int]
    ) -> None:
        """Count what each of several proposers contributed to a step.

        accepted_by: what the method `accepted_by` has returned.
        accepted: {request id: how many of its accepted draft tokens were emitted}.
        """
        if len(self.drafters) > 1 and not self._is_idle:
            emitted = [accepted.get(request_id, 0) for request_id in request_ids]
            self._own_counts.add(self._own_drafts, accepted_by, emitted)

    def end_step(self, report: StepReport) -> None:
        """Learn from a step's times what the next ones will cost."""
        has_asked = not self._is_idle and any(draft is not None for draft in self._own_drafts.values())
        if self._watch is not None:
            self._watch.add(report, has_asked=has_asked)
        if self._curve is None:
            return
        started = perf_counter()
        seconds = report.target_s + report.other_s + self._ended_s
        self._unsaved.append(report.draft_s + seconds)
        seconds += self._own_s  # which draft_s has, too, but no budget counts
        self._num_plain = 0 if has_asked else self._num_plain + 1
        num_requests = report.num_decode_requests
        num_tokens = 0 if report.num_prefill_tokens else report.num_nodes + num_requests
        self._num_alike = self._num_alike + 1 if num_tokens == self._num_tokens else 1
        self._num_tokens = num_tokens
        goes_on = self._rest is not None and self._rest.num_left > 0
        if self._is_idle and (goes_on or (report.num_prefill_tokens and len(self._unsaved) < LEAST_STEPS)):
            self._ended_s = 0.0
            return  # budgets learn of these steps together
        if not report.num_prefill_tokens:
            if has_asked and not report.num_nodes:
                self._curve.add_empty(num_requests, seconds)
            elif has_asked:
                self._curve.add(num_requests, num_tokens, seconds)
            elif (num_warm := self._num_plain - self._curve.num_cold(num_requests)) > 0:  # the mean of those together
                number = min(self._num_alike, num_warm, len(self._unsaved))
                self._curve.add(num_requests, num_tokens, fmean(self._unsaved[-number:]), number)
        num_drafts = sum(draft is not None and draft.num_nodes > 0 for draft in self._own_drafts.values())
        accepted = report.accepted_per_request if num_drafts == 1 else {}  # else it is not known whose they were
        for drafter in self.drafters:
            if drafter.budget is not None:
                draft = self._own_drafts.get(drafter.proposer.name)
                own = accepted if draft is not None and draft.num_nodes else {}
                drafter.budget.end_steps(self._unsaved, num_requests, own, is_prefill=report.num_prefill_tokens > 0)
        if self._plain_steps is not None:
            self._plain_steps.end_steps(sum(self._unsaved))
        self._unsaved.clear()
        self._ended_s = perf_counter() - started

    def metrics(self) -> list[Counter | Gauge]:
        """The proposers' own metrics and, if there are several, what each has drafted, as METHOD_NAME."""
        own: list[Counter | Gauge] = [metric for drafter in self.drafters for metric in drafter.proposer.metrics()]
        return own + self._own_counts.metrics()

    def reset(self, request: Request) -> None:
        self._end_rest()
        for drafter in self.drafters:
            drafter.reset(request)

    def finish(self, request: Request, reason: str) -> None:
        """Tell the proposers, once, that a request has ended. A request that was never announced to them is ignored.
        If an interrupt (Ctrl-C) stops this method, the engine calls it again.

        reason: the request's finish_reason.
        """
        if request.is_started:
            with then(lambda: self._forget(request)), ExitStack() as ending:
                for drafter in self.drafters:
                    ending.callback(drafter.finish, request, reason)
                ending.callback(self._end_rest)  # the last callback runs first

    def forget(self) -> None:
        for drafter in self.drafters:
            drafter.proposer.forget()

    def close(self) -> None:
        """Finish all started requests and close the proposers. Nothing may be called afterwards."""
        with ExitStack() as ending:
            for drafter in self.drafters:
                ending.callback(drafter.proposer.close)
            for request in list(self._started):
                ending.callback(self.finish, request, "abort")

    def abandon(self) -> None:
        """Call `close` where no caller could catch an exception: at garbage collection, or when the interpreter exits.
        A PluginError becomes a warning."""
        try:
            with use_device(self._device):
                self.close()
        except PluginError as error:
            warnings.warn(str(error), PluginWarning, stacklevel=2)

    def _forget(self, request: Request) -> None:
        self._started.discard(request)
        request.is_started = False
