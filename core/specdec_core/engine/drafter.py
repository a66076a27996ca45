"""Calls one proposer: asks it for drafts, checks them, and shows it the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from specdec_core.budget.budget import Budget
from specdec_core.budget.choice import Expected
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import Plan, ProposerBatch
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.device_check import DeviceChecks, read
from specdec_core.engine.draft_check import check_form, check_nodes, check_probs
from specdec_core.engine.named_proposer import NamedProposer
from specdec_core.engine.observer import Observer
from specdec_core.engine.request import Request
from specdec_core.engine.runner import Computed
from specdec_core.engine.scheduler import Schedule
from specdec_core.engine.step_batch import spread
from specdec_core.ops import REFERENCE
from specdec_core.ops.upload import upload
from specdec_core.sampling.random import CounterRandom


class Drafter:
    """Calls one proposer and checks its drafts.

    plan: what the proposer needs from the engine.
    num_speculative_tokens: the most draft tokens of a request in a step, for this proposer.
    group: the KV cache's group of its layers; None: it has none.
    max_tokens, most_each: the most tokens whose hidden states are stored, to be shown to the proposer later, of all
        requests and of each.
    ops: {name of an operation: operation}, with `draw` and `most_likely`.
    budget: decides how much to draft (adaptive_draft_length); None: as much as the scheduler allows.
    reads_drafts: whether drafts are checked on the host (`draft_check`) if their values can be read without waiting for
        a GPU. Other drafts are checked on their device (`device_check`). Some tests set it to False.
    """

    def __init__(
        self,
        proposer: NamedProposer,
        plan: Plan,
        *,
        num_speculative_tokens: int,
        group: int | None,
        max_tokens: int,
        most_each: int,
        vocab_size: int,
        device: torch.device,
        ops: Mapping[str, Callable[..., Any]] = REFERENCE,
        budget: Budget | None = None,
    ) -> None:
        self.proposer, self.plan = proposer, plan
        self.observer = Observer(proposer, plan, max_tokens, most_each, device, ops["most_likely"])
        self.budget, self.group = budget, group
        if budget is not None:
            self.observer.is_off = budget.is_off
        self.reads_drafts = True
        self.is_idle = False  # all requests of the last step for which it was asked are off
        self._asked: Sequence[Request] = ()  # the requests that it drafted for in this step
        self._num_speculative_tokens = num_speculative_tokens
        self._vocab_size, self._device, self._ops = vocab_size, device, ops
        self._device_checks = DeviceChecks(vocab_size)

    def start(self, request: Request) -> None:
        if self.budget is not None:
            self.budget.start(request, is_sampled=not request.params.is_greedy, may_sample=request.may_sample)
        with self.proposer.called() as proposer:
            proposer.start(request)

    def reset(self, request: Request) -> None:
        self.observer.forget(request)
        with self.proposer.called() as proposer:
            proposer.reset(request)

    def finish(self, request: Request, reason: str) -> None:
        """Tell the proposer that a request has ended, and why (its finish_reason). If an interrupt (Ctrl-C) stops this
        method, the engine calls it again."""
        self.observer.forget(request)
        if self.budget is not None:
            self.budget.finish(request, learns=reason in ("stop", "length"))
        with self.proposer.called() as proposer:
            proposer.finish(request, reason)

    def expects(self, request: Request) -> bool:
        """Whether the proposer may draft for a request that starts now, soon: it must not lack the first tokens."""
        tries_again = self.budget is not None and self.budget.retries.is_due
        return self.observer.may_ever_draft(request) if tries_again else self.observer.may_draft(request)

    def stays_idle(self, requests: Sequence[Request], *, is_prefill: bool, is_beside: bool = False) -> bool:
        """Whether it was decided in earlier steps that none of these requests drafts in this one. The arguments are
        those of `Budget.stays_idle`."""
        return self.budget is not None and self.budget.stays_idle(requests, is_prefill=is_prefill, is_beside=is_beside)

    def most_idle_steps(self, requests: Sequence[Request]) -> int:
        """For how many steps of these requests, from this one on, `stays_idle` need not be asked again."""
        num_alike = self.observer.num_alike(requests)
        return num_alike if self.budget is None else min(num_alike, self.budget.most_idle_steps(len(requests)))

    def pass_step(self) -> None:
        """Note that the proposer is not asked in this step, and that it observes nothing if there is no prefill."""
        self._asked, self.is_idle = (), True
        if self.budget is not None:
            self.budget.pass_step()

    def propose(self, schedule: Schedule, so_far: Expected) -> Draft | None:
        """Get the proposer's draft and extend it to all scheduled requests; None if no request drafts. The proposer
        sees only requests that may draft; the others get empty trees.

        so_far: what the step is expected to yield without this draft.

        Raises PluginError if the draft breaks its contract.
        """
        started = perf_counter()
        pairs = zip(schedule.requests, schedule.budgets, strict=True)
        wanted = [self._limit(request, budget) if budget else 0 for request, budget in pairs]
        if self.budget is not None:
            may_idle = not schedule.num_prefill_tokens and all(
                number or not self.observer.may_ever_draft(request)
                for request, number in zip(schedule.requests, wanted, strict=True)
            )
            wanted = self.budget.share(schedule.requests, wanted, so_far)
            self.is_idle = may_idle and not any(wanted)
            if self.is_idle or (may_idle and self.budget.retries.is_alone):
                self.budget.idle.begin(schedule.requests, is_beside=so_far.covered is not None)
        drafting = [request for request, budget in zip(schedule.requests, wanted, strict=True) if budget]
        self._asked = drafting
        if not drafting:
            return None
        before = perf_counter()
        self.observer.catch_up(drafting)
        late_s = perf_counter() - before
        budgets = tuple(budget for budget in wanted if budget)
        temperature = [0.0 if r.params.is_greedy else r.params.temperature for r in drafting]
        root_positions = upload([r.num_tokens - 1 for r in drafting], self._device)
        batch = ProposerBatch(
            requests=drafting,
            root_token_ids=upload([r.last_token_id for r in drafting], self._device),
            root_positions=root_positions,
            temperature=upload(temperature, self._device),
            host_temperature=tuple(temperature),
            max_draft_tokens=budgets,
            random=CounterRandom([r.seed for r in drafting], root_positions, self._ops["draw"]),
            levels=None if self.budget is None else self.budget.levels(budgets, self._device),
            may_sample=tuple(request.may_sample for request in drafting),
            most_likely=self._ops["most_likely"],
        )
        with self.proposer.called() as proposer:
            proposed = proposer.propose(batch)
            draft = self._checked(proposed, budgets)
        if self.budget is None:
            return spread(draft, wanted)
        is_host_made = proposed.is_on_host(proposed.token_ids)
        draft = spread(self.budget.keep(draft, is_host_made=is_host_made), wanted)
        self.budget.end_drafting(perf_counter() - started - late_s, late_s)
        return draft

    def observe(self, schedule: Schedule, computed: Computed, draft: Draft, verdict: Verdict) -> None:
        """Pass the hidden states of a forward pass to the proposer, if it wants them. The arguments are those of
        `Observer.observe`."""
        started = perf_counter()
        asked, self._asked = self._asked, ()
        num_shown = self.observer.observe(schedule, computed, draft, asked, verdict)
        if self.budget is not None and num_shown and not schedule.num_prefill_tokens:
            self.budget.observed(num_shown, perf_counter() - started)

    def _limit(self, request: Request, budget: int) -> int:
        """The most draft tokens that this proposer may draft for a request; 0 if the request may not draft.

        budget: the most draft tokens that the scheduler allows.
        """
        budget = min(budget, self._num_speculative_tokens)
        if self.plan.max_model_len is not None:
            budget = max(0, min(budget, self.plan.max_model_len - request.num_tokens))
        may_draft = self.observer.may_draft if self.budget is None else self.observer.may_ever_draft
        return budget if may_draft(request) else 0

    def _checked(self, draft: Draft, budgets: Sequence[int]) -> Draft:
        """Return the draft with copies on the host. Raises an error if it breaks its contract."""
        check_form(draft, budgets, self._vocab_size, self._device)
        if not draft.num_nodes:
            return draft
        if self.reads_drafts and draft.is_on_host(draft.token_ids, draft.parents):
            check_nodes(draft, self._vocab_size)
            if draft.is_on_host(draft.scores, draft.q, draft.q_rows, draft.q_ids, draft.q_to_target):
                check_probs(draft, self._vocab_size)
                return draft
        draft, is_wrong = read(draft, self._device_checks.is_wrong(draft))
        if is_wrong:
            on_host = draft.to("cpu")
            check_nodes(on_host, self._vocab_size)
            check_probs(on_host, self._vocab_size)
            raise RuntimeError("its draft was found to be wrong on the device, but on the host it is not")
        return draft
