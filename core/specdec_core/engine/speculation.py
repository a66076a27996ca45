"""The engine's side of the proposer's contract: whom it is told about, what it sees, what it may return."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from numbers import Integral
from typing import Any
from weakref import WeakSet

import torch

from specdec_core.engine.blame import blaming, blaming_in_step
from specdec_core.engine.draft_check import check_draft
from specdec_core.engine.request import Request
from specdec_core.engine.scheduler import Schedule
from specdec_core.engine.step_batch import StepBatch, observe, spread
from specdec_core.errors import PluginError
from specdec_core.plugins import PluginWarning
from specdec_core.proposer import PLUGIN_API, BuildContext, Proposer, ProposerSpec
from specdec_core.sampling.random import CounterRandom
from specdec_core.types import Draft, Plan, ProposerBatch, StepCosts, TargetInfo, Verdict

METHODS = ("start", "propose", "observe", "reset", "finish")
"""What a proposer must have. It may lack `close`, which is younger than this plugin API."""


def planned(spec: ProposerSpec, options: Any, target: TargetInfo, num_speculative_tokens: int) -> Plan:
    """What a proposer will need. Raises PluginError if it cannot tell."""
    with blaming(f"proposer {spec.name!r}", "plan what it needs"):
        plan = spec.plan(options, target, num_speculative_tokens)
        if not isinstance(plan, Plan):
            raise TypeError(f"plan returned {plan!r}, not a Plan")
        sizes = {"scratch_slots": plan.scratch_slots, "weight_bytes": plan.weight_bytes}
        if plan.max_model_len is not None:
            sizes["max_model_len"] = plan.max_model_len
        for field, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, Integral) or size < 0:
                raise TypeError(f"its plan has {field}={size!r}: give a whole number, 0 or more")
    return plan


def built(spec: ProposerSpec, options: Any, context: BuildContext) -> Proposer:
    """A proposer. Raises PluginError if it cannot be made, or is none."""
    with blaming(f"proposer {spec.name!r}", "be built"):
        proposer = spec.build(options, context)
        missing = [name for name in METHODS if not callable(getattr(proposer, name, None))]
        if missing:
            raise TypeError(f"build returned {proposer!r}, which has no {', '.join(missing)}: subclass Proposer")
    return proposer


@torch.inference_mode()
def close(proposer: Proposer) -> None:
    """Close it, if it can be."""
    if callable(method := getattr(proposer, "close", None)):
        method()


class NoProposer(Proposer):
    """Plain decoding: never asked, since no request has a budget."""

    def propose(self, batch: ProposerBatch) -> Draft:
        return Draft.from_chains([[]] * len(batch.requests))


PLAIN = ProposerSpec(
    name="none",
    config=object,
    build=lambda config, context: NoProposer(),
    api=PLUGIN_API,
    plan=lambda config, target, num_speculative_tokens: Plan(observes=False),
)


class Speculation:
    """A proposer, called as its contract says. Whatever it raises comes out as a PluginError that names it.

    observes: what its plan says.
    """

    def __init__(self, proposer: Proposer, name: str, *, observes: bool, vocab_size: int, device: torch.device) -> None:
        self._proposer = proposer
        self._name = name
        self._observes = observes
        self._vocab_size = vocab_size
        self._device = device
        self._started: WeakSet[Request] = WeakSet()  # weak: a request may lead to its engine, by way of its listener

    def announce(self, schedule: Schedule) -> None:
        """Tell of requests that were preempted, and of those scheduled for the first time."""
        for request in schedule.preempted:
            self.reset(request)
        for request in schedule.requests:
            if not request.is_started:
                request.is_started = True
                self._started.add(request)
                with self._called() as proposer:
                    proposer.start(request)

    def propose(self, schedule: Schedule, costs: StepCosts | None = None) -> Draft:
        """A draft over all scheduled requests; the proposer sees only those that have a budget."""
        drafting = [r for r, budget in zip(schedule.requests, schedule.budgets, strict=True) if budget]
        if not drafting:
            return Draft.from_chains([[]] * len(schedule.requests), self._device)
        budgets = tuple(budget for budget in schedule.budgets if budget)
        root_positions = torch.tensor([r.num_tokens - 1 for r in drafting], device=self._device)
        batch = ProposerBatch(
            requests=drafting,
            root_token_ids=torch.tensor([int(r.token_ids[-1]) for r in drafting], device=self._device),
            root_positions=root_positions,
            temperature=torch.tensor(
                [0.0 if r.params.is_greedy else r.params.temperature for r in drafting], device=self._device
            ),
            max_draft_tokens=budgets,
            random=CounterRandom([r.seed for r in drafting], root_positions),
            costs=costs,
        )
        with self._called() as proposer:
            draft = proposer.propose(batch)
            check_draft(draft, budgets, self._vocab_size, self._device)
        return spread(draft, schedule.budgets)

    def observe(
        self, schedule: Schedule, batch: StepBatch, draft: Draft, verdict: Verdict, features: dict[str, torch.Tensor]
    ) -> None:
        """Show what a pass made final to a proposer that wants to know."""
        if self._observes:
            observation = observe(schedule, batch, draft, verdict, features)
            with self._called() as proposer:
                proposer.observe(observation)

    def reset(self, request: Request) -> None:
        with self._called() as proposer:
            proposer.reset(request)

    def finish(self, request: Request, reason: str) -> None:
        if request.is_started:
            request.is_started = False
            self._started.discard(request)
            with self._called() as proposer:
                proposer.finish(request, reason)

    def close(self) -> None:
        """Finish what was started and close the proposer: once, and nothing may be called afterwards."""
        with ExitStack() as ending:
            ending.callback(self._close)
            for request in list(self._started):
                ending.callback(self.finish, request, "abort")

    def abandon(self) -> None:
        """`close` where nobody hears an exception: when the engine is collected, or the interpreter exits."""
        try:
            self.close()
        except PluginError as error:
            warnings.warn(str(error), PluginWarning, stacklevel=2)

    def _close(self) -> None:
        try:
            close(self._proposer)
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"proposer {self._name!r} failed to close: {type(error).__name__}: {error}. What it was to keep may be "
                f"lost; report this to the plugin's author"
            ) from error

    @contextmanager
    def _called(self) -> Iterator[Proposer]:
        with blaming_in_step(f"proposer {self._name!r}"), torch.inference_mode():  # cancelled ones finish between steps
            yield self._proposer
