"""All proposers of an engine, from the first request to the end."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from weakref import WeakSet

import torch

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import StepCosts
from specdec_core.contracts.verifier import Verdict
from specdec_core.drafting.combining import combine_drafts
from specdec_core.engine.device import made_current
from specdec_core.engine.drafter import Drafter
from specdec_core.engine.request import Request
from specdec_core.engine.runner import Computed
from specdec_core.engine.safe_draft import Doubt
from specdec_core.engine.scheduler import Schedule
from specdec_core.errors import PluginError
from specdec_core.plugins import PluginWarning


class Speculation:
    """drafters: none of them for plain decoding. The drafts of several are combined: see `combine_drafts`."""

    def __init__(self, drafters: Sequence[Drafter], device: torch.device) -> None:
        self.drafters, self._device = tuple(drafters), device
        self._started: WeakSet[Request] = WeakSet()  # weak: a request may lead to its engine, by way of its listener

    def announce(self, schedule: Schedule) -> None:
        """Tell of requests that were preempted, and of those scheduled for the first time."""
        for request in schedule.preempted:
            self.reset(request)
        for request in schedule.requests:
            if not request.is_started:
                self._started.add(request)
                request.is_started = True
                for drafter in self.drafters:
                    drafter.start(request)

    def propose(self, schedule: Schedule, costs: StepCosts | None = None) -> tuple[Draft, Sequence[Doubt]]:
        """A draft over all scheduled requests, and what is yet to be known of it before anything is emitted."""
        found = [drafter.propose(schedule, costs) for drafter in self.drafters]
        drafts = [draft for draft, _ in found if draft.num_nodes]
        doubts = [doubt for _, doubt in found if doubt is not None]
        if not drafts:
            return Draft.from_chains([[]] * len(schedule.requests), self._device), doubts
        return drafts[0] if len(drafts) == 1 else combine_drafts(drafts, schedule.budgets), doubts

    def observe(self, schedule: Schedule, computed: Computed, draft: Draft, verdict: Verdict) -> None:
        """Show what a pass made final to proposers that want to know. The verdict is on the host."""
        for drafter in self.drafters:
            drafter.observer.observe(schedule, computed, draft, verdict)

    def reset(self, request: Request) -> None:
        for drafter in self.drafters:
            drafter.reset(request)

    def finish(self, request: Request, reason: str) -> None:
        """Once, unless an interrupt breaks it off: then it is called again."""
        if request.is_started:
            try:
                with ExitStack() as ending:
                    for drafter in self.drafters:
                        ending.callback(drafter.finish, request, reason)
            except PluginError:
                self._forget(request)
                raise
            self._forget(request)

    def close(self) -> None:
        """Finish what was started and close the proposers: once, and nothing may be called afterwards."""
        with ExitStack() as ending:
            for drafter in self.drafters:
                ending.callback(drafter.proposer.close)
            for request in list(self._started):
                ending.callback(self.finish, request, "abort")

    def abandon(self) -> None:
        """`close` where nobody hears an exception: when the engine is collected, or the interpreter exits."""
        try:
            with made_current(self._device):
                self.close()
        except PluginError as error:
            warnings.warn(str(error), PluginWarning, stacklevel=2)

    def _forget(self, request: Request) -> None:
        self._started.discard(request)
        request.is_started = False
