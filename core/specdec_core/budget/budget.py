"""The budget of one proposer: which requests draft in a step, and which of their draft tokens are verified."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import fmean
from time import perf_counter

import numpy as np
import torch
from attrs import evolve

from specdec_core.budget.choice import Expected, best_levels
from specdec_core.budget.clock import Clock
from specdec_core.budget.cost_curve import CostCurve
from specdec_core.budget.coverage import expected_with, worth_beside
from specdec_core.budget.cutting import without_dear_nodes
from specdec_core.budget.held import CHOICE_SHARE, MOST_HELD, NUM_HELD, Held
from specdec_core.budget.idle import Idle
from specdec_core.budget.levels import Levels
from specdec_core.budget.nodes import Nodes, without
from specdec_core.budget.recent import Average
from specdec_core.budget.retries import MOST_TOGETHER, NUM_TOKENS as RETRY_TOKENS, OUTLIER, Retries
from specdec_core.budget.starts import Starts
from specdec_core.budget.survival import Past, Survival
from specdec_core.budget.unlearned import Unlearned
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import RequestView

MIN_SAVING_TO_START, MIN_SAVING_TO_GO_ON = 0.14, 0.1
"""The share of the time that drafting has to save. Estimates err, and those that err upward are the ones that are acted
on: in close cases, drafts save about a tenth less than is expected. To start takes more: after a draft, plain steps are
slower (COLD_S), and so are first drafts."""
MOST_CHOSEN = 64
"""Levels that are considered before drafting; a request for which all of them pay may have any number."""
NUM_VAIN = 4
"""Retries in a row without a gain, after which the budget chooses anew. Learning and choosing take longer than that."""
LEAST_RATIO = 4
"""Draft tokens are judged one by one only if verifying them takes at least this many times as long as judging."""
NUM_BETWEEN_CUTS = 64
"""Steps after which they are judged anyway, to measure how long that takes."""
LEAST_KEPT = 0.1
"""Draft tokens of a draft that count as verified, at least: costs per token need some."""
NEWEST_WEIGHT = 0.1
"""Of the newest draft, in averages."""
WHOLE = np.ones(1)
"""The worth of every request's draft tokens where no other proposer drafts."""


class Budget:
    """Decides for one proposer, so that the expected time per output token of a step's requests is lowest (`choice`).

    1. `share`, before drafting: which requests draft. If the proposer does not ask about levels, and its draft tokens
       cannot be judged one by one (they have no scores, or were sampled), also how many.
    2. `levels`, while drafting: which requests get another level, if the proposer asks.
    3. `keep`, after drafting: which chosen draft tokens are verified. Sampled ones must not be dropped.

    What a request gains is learned from earlier drafts (`Survival`), what a step costs from measured steps
    (`CostCurve`) and drafts (`Clock`). Requests that do not draft are tried again from time to time. None of this
    changes the distribution of the output, nor the text of a request whose drafts are chosen.

    curve: of the target, shared by all proposers of an engine.
    num_speculative_tokens: the most draft tokens of a request in a step, for this proposer.
    in_place: whether a node must keep its index among its request's nodes, since the draft's KV cache depends on it.
    observes: whether the proposer reads the target's hidden states.

    Attributes: survival, what was learned of the proposer's drafts. idle, which requests do not draft. retries, when
    these are tried again. saved_share, of the time per output token: what drafting is expected to save, by the last
    choice; 0 if nothing is drafted.
    """

    def __init__(
        self,
        curve: CostCurve,
        max_num_seqs: int,
        num_speculative_tokens: int,
        *,
        in_place: bool,
        observes: bool = True,
    ) -> None:
        self._curve, self._most, self._in_place = curve, num_speculative_tokens, in_place
        self.survival = Survival(max_num_seqs)
        self.idle = Idle(curve, self.survival.group)
        self._first, self._level, self._observe, self._cutting = (Clock(lambda: curve.load) for _ in range(4))
        # What the last draft showed of the proposer.
        self._asks_levels = self._judges_nodes = self._is_chosen_on_host = False
        # Averages of drafts: draft tokens of a level, levels after the first, draft tokens that are verified, and the
        # share of the expected gain that these have. Drafts that a limit keeps short do not count.
        self._nodes_per_level, self._levels_per_draft = Average(1.0, NEWEST_WEIGHT), Average(1.0, NEWEST_WEIGHT)
        self._kept_per_draft, self._kept_gain = Average(1.0, NEWEST_WEIGHT), Average(1.0, NEWEST_WEIGHT)
        self.retries, self._observes, self._starts = Retries(), observes, Starts()
        self._num_kept = 0  # draft tokens of this step that are verified
        self.saved_share = 0.0
        self._can_retry = True  # some request of the last step may have draft tokens
        self._num_steps = 0
        self._held: Held | None = None  # the last choice, while it may hold
        self._last_length = 0  # the number of steps for which the last choice was to hold
        self._chose_s = 0.0  # what choosing took in this step
        self._choice_s = Average(0.0, NEWEST_WEIGHT)  # what choosing takes on average
        self._unlearned = Unlearned(self.survival)
        # Of this step: how many requests are scheduled, those that draft, and what they may ask.
        self._num_scheduled = 1
        self._requests: Sequence[RequestView] = ()
        self._rows = np.empty(0, dtype=np.int64)
        self._worth = WHOLE  # the share of their accepted draft tokens that other proposers are expected not to have
        self._known: tuple[Sequence[RequestView], np.ndarray] = (), self._rows
        self._limits: Sequence[int] = ()
        self._levels: Levels | None = None
        self._so_far = self._of_drafting = Expected.of_plain(0)
        self._drafted_s = 0.0
        self._began = 0.0  # when the proposer was asked for the step's drafts

    def start(self, request: RequestView, *, is_sampled: bool, may_sample: bool = False) -> None:
        """is_sampled: whether the request has a temperature above 0. may_sample: as in `ProposerBatch`."""
        self._can_retry = True
        if self._unlearned:  # a new request may get the row of one that has ended, or its id
            self._learn()
        if self._held is not None and request.id in self._held.numbers:
            self._held = None
        self.survival.start(request, is_sampled=is_sampled, may_sample=may_sample)

    def finish(self, request: RequestView, *, learns: bool = True) -> None:
        """Forget a request. May be called twice, and for a request that did not start. It keeps its row in `survival`
        until its last drafts were learned from, in a later step if other requests go on.

        learns: False if their device may have failed: they are dropped."""
        self.idle.forget(request)
        self._requests, self._known = (), ((), self._rows)
        if self._unlearned.finish(request, learns=learns):
            self._learn()

    def is_off(self, request: RequestView) -> bool:
        """Whether a request does not draft at present."""
        return self.idle.is_off(request)

    def stays_idle(self, requests: Sequence[RequestView], *, is_prefill: bool = False, is_beside: bool = False) -> bool:
        """Whether it is already decided that none of these requests drafts in this step. It is not if drafts in shadow
        turn out to have gained. is_prefill, is_beside: whether a prompt is read, and whether other proposers have
        drafts."""
        if self.num_awaited == 0 and self._settle():
            self.idle.end()
        is_due = self._can_retry and self.retries.is_due
        return not is_due and self.idle.goes_on(requests, is_prefill=is_prefill, is_beside=is_beside)

    @property
    def num_awaited(self) -> int | None:
        """That of `Unlearned`: when it is 0, it shows whether what was drafted in shadow would have gained."""
        return self._unlearned.num_awaited

    def most_idle_steps(self, num_requests: int) -> int:
        """For how many steps of so many requests, from this one on, nothing has to be decided: until it is time to
        learn, or to try again."""
        awaited = sys.maxsize if self.num_awaited is None else self.num_awaited
        if not self._can_retry:
            return awaited
        return min(awaited, max(1, self.retries.num_until_due(self._curve.at(num_requests))))

    def pass_step(self) -> None:
        """Note that the proposer was not asked in a step."""
        if self._unlearned.ended:  # do not keep them alive
            self._learn()
        self._held = None  # the next choice is a new one
        self.retries.begin()
        self._starts.end()

    def share(self, requests: Sequence[RequestView], limits: Sequence[int], so_far: Expected) -> list[int]:
        """Return the most draft tokens of each request; 0: it does not draft in this step.

        limits: the most draft tokens that each request may have.
        so_far: what the step is expected to yield without drafts of this proposer.
        """
        # After a retry without a gain, all requests stay off.
        is_vain = self.retries.num_vain % NUM_VAIN > 0 and self.num_awaited != 0
        is_vain = is_vain and self.idle.goes_on(requests, is_prefill=False, is_beside=so_far.covered is not None)
        self.idle.end()
        self.retries.begin()
        self._so_far, self._drafted_s, self._chose_s, self._num_scheduled = so_far, 0.0, 0.0, len(requests)
        if all(limits):
            asked, most, of_asked = requests, limits, so_far
        else:
            asked = [request for request, limit in zip(requests, limits, strict=True) if limit]
            most, of_asked = [limit for limit in limits if limit], so_far.only(np.flatnonzero(limits))
        self._can_retry = bool(asked)
        self._requests = ()
        if not asked:
            if self._unlearned.ended:
                self._learn()
            return list(limits)
        numbers = [0] * len(asked) if is_vain else self._numbers(asked, most, of_asked)
        if self.retries.is_due and not all(numbers):
            started, has_shadows = perf_counter(), self._has_shadows(numbers)
            if not is_vain:
                self.retries.judge(may_gain=any(numbers) or self._may_gain(most, of_asked))
            numbers = self.retries.choose([request.id for request in asked], most, numbers, has_shadows=has_shadows)
            self._chose_s += perf_counter() - started
            if self._held is not None:
                self._held.end_soon()
        if not any(numbers) or self.retries.is_alone:
            self._starts.end()
        if not any(numbers):
            return [0] * len(limits)
        self._requests, self._of_drafting = asked, of_asked
        if not all(numbers):
            drafting = np.flatnonzero(numbers)
            self._requests, self._of_drafting = [asked[i] for i in drafting.tolist()], of_asked.only(drafting)
        self._rows = self._rows_of(self._requests)
        self._worth = self._worth_of(self._rows, self._of_drafting)
        # What drafting at all costs is decided: further draft tokens need not pay for it.
        observe_s = self._observe.seconds(len(self._requests))
        if observe_s:
            self._so_far = so_far.after_drafting(observe_s)
            self._of_drafting = self._of_drafting.after_drafting(observe_s)
        given = iter(numbers)
        return numbers if len(asked) == len(requests) else [next(given) if limit else 0 for limit in limits]

    def levels(self, limits: Sequence[int], device: torch.device) -> Levels | None:
        """Return the `LevelBudget` for the requests that draft in this step; None on a GPU, where asking it would wait
        for the device. limits: the most draft tokens of each."""
        self._began, self._limits = perf_counter(), limits
        if device.type != "cpu":
            self._levels = None
            return None
        self._levels = Levels(self._rows, limits, self.survival, self._worth, self._costs_of_levels)
        return self._levels

    def keep(self, draft: Draft, *, is_host_made: bool = True) -> Draft:
        """Return the draft without chosen draft tokens that are not worth verifying. Requests with a sampled one keep
        all of theirs. Remembers the whole draft, to learn from it: draft tokens that are cut may turn out right.

        is_host_made: False if it was made on a GPU, where longer drafts take more time and are not broken off.
        """
        levels, size = self._levels, draft.batch_size
        asks_now = levels is not None and levels.first_s is not None  # not if only one token was allowed
        self._asks_levels = levels is not None and (self._asks_levels or asks_now)
        drafted_s = self._drafted_s = perf_counter() - self._began
        # q is large, and not looked at.
        whole = draft if draft.q is None else evolve(draft, q=None, q_to_target=None, q_ids=None)
        is_read = draft.is_on_host(draft.scores, draft.parents, draft.q_rows)
        if draft.num_nodes:
            self._is_chosen_on_host = draft.q is None and is_read and is_host_made
            self._judges_nodes = draft.scores is not None and self._is_chosen_on_host
        if self.retries.shadows:
            draft = self._without_shadows(draft)
        if draft.num_nodes:
            num_found = sum(number > 0 for number in draft.num_nodes_per_request)
            per_level, kept_gain = draft.num_nodes / num_found / max(1, draft.max_depth), 1.0
            self._nodes_per_level.add(per_level)
            if draft.scores is not None and is_read and self._is_worth_cutting(draft):
                started = perf_counter()
                draft, kept_gain = without_dear_nodes(
                    draft,
                    self._rows,
                    self._worth,
                    self.survival,
                    self._of_drafting.after_drafting(drafted_s),
                    self._seconds,
                    in_place=self._in_place,
                )
                self._cutting.add(size, perf_counter() - started, self._num_steps)
            self._kept_gain.add(kept_gain)
            if not self.retries.number:
                pairs = zip(draft.num_nodes_per_request, self._limits, strict=True)
                if usual := [number for number, limit in pairs if number and limit >= self._most]:
                    self._kept_per_draft.add(fmean(usual))
        self._num_kept = draft.num_nodes
        num_tokens = [len(request.token_ids) for request in self._requests]
        if self._is_chosen_on_host or not self.retries.shadows:
            past = Past(self._requests, self._rows, num_tokens, self._limits, whole, bool(self.retries.shadows))
            self._unlearned.add(past)
        return draft

    def end_drafting(self, seconds: float, late_s: float) -> None:
        """Count the time that a draft took, from `share` to the end of what follows `keep`. seconds: without late
        observations, which took late_s."""
        levels, size, step = self._levels, len(self._requests), self._num_steps
        own_s = seconds - self._chose_s  # choosing is in few steps, so that a mean without outliers would leave it out
        first_s, level_s = self._first.seconds(size), self._level.seconds(size)
        num_more = 0 if levels is None or levels.first_s is None else levels.num_forwarded
        more_s = own_s + late_s - first_s - num_more * level_s
        if self._starts.is_next and more_s > 0 and self._first.knows(size):
            self._starts.add(size, more_s, step)
        elif num_more and levels is not None and levels.first_s is not None:
            of_level_s = (self._drafted_s - levels.first_s) / num_more
            self._first.add(size, own_s - of_level_s * num_more, step)
            self._level.add(size, of_level_s, step)
        else:
            self._first.add(size, own_s, step)
        if not self.retries.is_alone:
            self._starts.go_on()
        if number := self.retries.number:
            usual_s = first_s + RETRY_TOKENS * level_s
            if usual_s or not self._observes:  # else the first calls, which may be slow, are all that is known
                seconds = min(seconds, OUTLIER * usual_s)
            share = len(self.retries.ids) / max(1, size - len(self.retries.shadows))
            num_verified = round(self._num_kept * share)
            more_s = self._curve.more_s(self._num_scheduled, self._so_far.num_rows, num_verified)
            seconds = seconds * number / size + late_s + self._observe.seconds(number)
            self.retries.expect(seconds, more_s)
        elif levels is not None and max(self._limits) >= self._most and (level_s or not levels.num_forwarded):
            self._levels_per_draft.add(levels.num_forwarded)
        self._levels = None  # which knows this budget

    def after(self, requests: Sequence[RequestView], draft: Draft) -> Expected:
        """What the step is expected to yield together with a draft of this proposer. requests, draft: all that are
        scheduled, those that did not draft included."""
        so_far = self._so_far
        if not draft.num_nodes or not draft.is_on_host(draft.scores, draft.parents, draft.q_rows):
            return so_far
        return expected_with(draft, self._drafted_s, so_far, self.survival, requests)

    def observed(self, num_requests: int, seconds: float) -> None:
        """Count the time that the proposer took for observing requests in a step without prefill."""
        self._observe.add(num_requests, seconds, self._num_steps)

    def end_steps(
        self, seconds: Sequence[float], num_requests: int, accepted: Mapping[str, int], *, is_prefill: bool = False
    ) -> None:
        """Count steps, and the seconds that each took. num_requests, is_prefill: of the last one. accepted: in it,
        {request id: accepted draft tokens}; empty if it is not known which proposer's they were."""
        self._num_steps += len(seconds)
        if num_requests:
            plain_s = self._curve.at(num_requests)
            self.retries.end_steps(seconds, plain_s, accepted, num_requests, is_prefill=is_prefill)

    @property
    def _seconds(self) -> np.ndarray:
        """Of this step but for drafting, by its number of tokens."""
        return self._curve.seconds(self._num_scheduled)

    def _costs_of_levels(self) -> tuple[np.ndarray, Expected, float]:
        """The `costs` of `Levels`."""
        size = len(self._limits)
        so_far = self._of_drafting.after_drafting(self._first.seconds(size))
        # In a retry, and if none was measured lately, levels go on whatever they cost, which is then measured again.
        level_s = 0.0 if self.retries.number else self._level.recent_seconds(size, self._num_steps)
        return self._seconds, so_far, level_s

    @property
    def _lengths_vary(self) -> bool:
        """Whether it shows only while or after drafting how many draft tokens pay."""
        return self._asks_levels or self._judges_nodes

    def _rows_of(self, requests: Sequence[RequestView]) -> np.ndarray:
        if requests != self._known[0]:
            self._known = requests, self.survival.rows(requests)
        return self._known[1]

    def _settle(self) -> bool:
        """Compare drafts in shadow with the text that followed, where it is long enough. Return whether verifying one
        of them would have gained."""
        has_gained = False
        for draft, num_accepted in self._unlearned.settle():
            size = draft.batch_size
            more_s = self._first.seconds(size) + self._curve.more_s(size, size, draft.num_nodes)
            gained_s = num_accepted * self._curve.at(size) / size
            self.retries.show(gained_s, more_s, self._choice_s.value)
            has_gained |= gained_s > more_s
        return has_gained

    def _learn(self) -> None:
        has_gained = self._settle()
        may_have_gained = any(past.draft.num_nodes and not past.has_shadows for past in self._unlearned.past)
        self._unlearned.learn()
        if has_gained or may_have_gained:  # else new requests that are expected not to draft still need not be judged
            self.idle.learned()

    def _numbers(self, requests: Sequence[RequestView], limits: Sequence[int], so_far: Expected) -> list[int]:
        """The most draft tokens of each request, by expected gain; 0: none. so_far: of these requests."""
        held, is_beside = self._held, so_far.covered is not None
        is_informed, ids = self._first.knows(len(requests)), [request.id for request in requests]
        numbers = None
        if held is not None and self.num_awaited != 0:
            numbers = held.take(ids, limits, is_beside=is_beside, is_informed=is_informed)
        if numbers is None:
            started = perf_counter()
            self._learn()
            if held is None:
                self._curve.refresh()
            rows = self._rows_of(requests)
            self.survival.update(rows)
            numbers = self._choose(rows, limits, so_far)
            self.idle.decide(requests, numbers)
            self._held = Held.of(
                ids,
                limits,
                numbers,
                is_beside=is_beside,
                is_informed=is_informed,
                least=self._num_held(so_far.num_rows + sum(numbers)),
                before=held,
            )
            self._chose_s = perf_counter() - started
            if self._last_length:  # the first choice is much slower
                self._choice_s.add(self._chose_s)
            self._last_length = self._held.length
        if self._lengths_vary:
            return [limit if number else 0 for number, limit in zip(numbers, limits, strict=True)]
        return [min(number, limit) for number, limit in zip(numbers, limits, strict=True)]

    def _num_held(self, num_tokens: int) -> int:
        """For how many steps of so many tokens a choice holds, at least."""
        wanted = self._choice_s.value / CHOICE_SHARE / self._curve.at(self._num_scheduled, num_tokens)
        return min(max(int(wanted), NUM_HELD), MOST_HELD)

    def _worth_of(self, rows: np.ndarray, so_far: Expected) -> np.ndarray:
        return WHOLE if so_far.covered is None else worth_beside(so_far.covered, self.survival, rows)

    def _choose(self, rows: np.ndarray, limits: Sequence[int], so_far: Expected) -> list[int]:
        num_requests, size = len(limits), max(1, round(self._nodes_per_level.value))
        found = self.survival.of_any(rows)  # it pays for draft tokens only where there are any
        level_s = self._level.seconds(num_requests)
        first_s = self._first.seconds(num_requests) + self._observe.seconds(num_requests)
        first_s += self._starts.seconds(num_requests, self._num_steps)
        first_s += self._choice_s.value / max(self._last_length, self._num_held(so_far.num_rows))
        none_found = float(np.prod(1 - found))
        first_s += self._curve.empty_s * none_found
        if self._lengths_vary:  # whether to draft, and with as many levels as usual
            gains = self.survival.of_depths(rows, min(max(limits), MOST_CHOSEN)).cumprod(axis=1)
            gains = (gains * (np.arange(gains.shape[1]) < np.array(limits)[:, None])).sum(axis=1, keepdims=True)
            gains *= self._kept_gain.value
            sizes = max(self._kept_per_draft.value, LEAST_KEPT) * found
            first_s, level_s = first_s + level_s * self._levels_per_draft.value, 0.0
        else:
            num_levels = min(ceil(max(limits) / size), MOST_CHOSEN)
            gains = self.survival.of_depths(rows, num_levels).cumprod(axis=1)
            gains *= size * np.arange(num_levels) < np.array(limits)[:, None]
            sizes, first_s = size * found, first_s - level_s
        gains *= (self._worth_of(rows, so_far) * found)[:, None]
        chosen, saved = best_levels(gains, sizes, so_far, self._seconds, first_s, level_s, none_found)
        least = MIN_SAVING_TO_START if self.idle.is_all_off else MIN_SAVING_TO_GO_ON
        self.saved_share = saved if saved > least else 0.0
        if not self.saved_share:
            if not self.retries.may_gain:  # as was judged for other requests, or at other costs
                self.retries.judge(may_gain=self._may_gain(limits, so_far))
            return [0] * num_requests
        if self._lengths_vary:
            return [self._most if number else 0 for number in chosen.tolist()]
        return [self._most if number == MOST_CHOSEN else number * size for number in chosen.tolist()]

    def _may_gain(self, limits: Sequence[int], so_far: Expected) -> bool:
        """Whether drafting would pay if all draft tokens were accepted, and each level had only one of them."""
        num_requests, num_levels = len(limits), min(max(limits), MOST_CHOSEN)
        level_s = self._level.seconds(num_requests)
        first_s = self._first.seconds(num_requests) + self._observe.seconds(num_requests)
        gains = (np.arange(num_levels) < np.array(limits)[:, None]).astype(float)
        _, saved = best_levels(gains, np.ones(num_requests), so_far, self._seconds, first_s - level_s, level_s)
        return saved > 0

    def _has_shadows(self, numbers: Sequence[int]) -> bool:
        """Whether more requests that are off draft, in shadow, if a few are tried again: if that takes less time, for
        each request, than drafting for these few and verifying it. Sampled draft tokens would say too little: one may
        be accepted though the request would have emitted another token without it. numbers: of draft tokens of each
        request; 0: it is off."""
        num_off = sum(not number for number in numbers)
        if self._asks_levels or self._observes or not self._is_chosen_on_host:
            return False
        num_few = min(num_off, MOST_TOGETHER)
        few_s = self._first.seconds(num_few)
        few_s += self._curve.more_s(self._num_scheduled, self._so_far.num_rows, num_few * RETRY_TOKENS)
        return self._first.seconds(num_off) / num_off < few_s / num_few

    def _without_shadows(self, draft: Draft) -> Draft:
        """The draft without what was drafted in shadow."""
        if len(self.retries.shadows) == len(self._requests):
            return Draft.from_chains([[]] * draft.batch_size, draft.token_ids.device)
        is_shadow = np.array([request.id in self.retries.shadows for request in self._requests])
        nodes = Nodes.of(draft)
        return without(draft, nodes, ~is_shadow[nodes.requests])

    def _is_worth_cutting(self, draft: Draft) -> bool:
        """Whether the forward pass takes so much longer with the draft tokens that judging them one by one pays. Now
        and then they are judged anyway, to keep measuring how long that takes."""
        if self._num_steps % NUM_BETWEEN_CUTS == 0:
            return True
        more_s = self._curve.more_s(self._num_scheduled, self._so_far.num_rows, draft.num_nodes)
        return more_s > LEAST_RATIO * self._cutting.seconds(draft.batch_size)
