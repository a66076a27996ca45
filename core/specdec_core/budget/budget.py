"""The budget of one proposer: which requests draft in a step, and which of their draft tokens are verified."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from operator import le
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from attrs import evolve

from specdec_core.budget.choice import Expected, best_levels, best_nodes
from specdec_core.budget.clock import Clock
from specdec_core.budget.cost_curve import NUM_COLD, NUM_NEEDED, CostCurve
from specdec_core.budget.coverage import expected_with, worth_beside
from specdec_core.budget.debt import Debt
from specdec_core.budget.levels import Levels
from specdec_core.budget.nodes import Nodes, without
from specdec_core.budget.survival import Past, Survival
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import RequestView

RETRY_TOKENS = 4
"""Draft tokens of a request that is tried again."""
RETRYING, SAMPLING = 0.01, 0.02
"""The share of the time that may be lost by trying again, and by measuring plain steps."""
MOST_CHOSEN = 64
"""Levels that are considered before drafting; a request for which all of them pay may have any number."""
LEAST_RATIO = 4
"""Draft tokens are judged one by one only if verifying them takes at least this many times as long as judging."""
NUM_BETWEEN_CUTS = 64
"""Steps after which they are judged anyway, to measure how long that takes."""
TO_START, TO_GO_ON = 0.06, 0.03
"""The share of the time that drafting has to save. Estimates err by a few percent, and are acted upon where they are
too good. To start takes more: plain steps between drafts are slower (NUM_COLD), and so are the first drafts."""
NEWEST = 0.1
"""The weight of the newest draft in averages."""
ALL = np.ones(1)
"""The worth of every request's draft tokens where no other proposer drafts."""
NUM_SAMPLES = NUM_COLD + NUM_NEEDED + 1
"""Plain steps in a row, to measure the last of them."""
COLD = 0.2
"""By what share they take longer than other plain steps, on average."""
CLOSE, MOST_RARER = 0.1, 3.0
"""Where drafting saves more than the share CLOSE, it hardly turns out to be slower, and plain steps are measured the
rarer, the more it saves: up to MOST_RARER times."""
SAME = 0.1
"""Costs that have changed by less than this share change no decision that nothing is drafted."""
NUM_HELD = 8
"""Steps for which a choice before drafting holds while the requests stay the same. Then is learned from all that was
drafted meanwhile: choosing and learning each take as long as a small draft."""
OUTLIER = 4.0
"""Drafting that took longer than this many times the usual was interrupted, and counts as that."""


class Held(NamedTuple):
    """A choice of draft tokens, and for what it was made. age: in steps."""

    requests: Sequence[RequestView]
    limits: list[int]
    numbers: list[int]
    age: int = 1

    def is_for(self, requests: Sequence[RequestView], limits: list[int]) -> bool:
        """Whether it still holds: where a limit has grown, more draft tokens may pay."""
        is_within = limits == self.limits or all(map(le, limits, self.limits))
        return self.age < NUM_HELD and self.requests == requests and is_within


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

    Attribute: survival, what was learned of the proposer's drafts.
    """

    def __init__(self, curve: CostCurve, max_num_seqs: int, num_speculative_tokens: int, *, in_place: bool) -> None:
        self._curve, self._most, self._in_place = curve, num_speculative_tokens, in_place
        self.survival = Survival(max_num_seqs)
        self._first, self._level, self._observe, self._cutting = Clock(), Clock(), Clock(), Clock()
        self._asks_levels = self._judges_nodes = False  # what the last draft showed of the proposer
        self._nodes_per_level = self._levels_per_draft = self._kept_per_draft = 1.0  # on average
        self._off: set[str] = set()  # ids of requests that do not draft
        self._is_all_off = False
        self._retries, self._samples = Debt(RETRYING), Debt(SAMPLING)
        self._retry_s = 0.0  # what the retry of this step is expected to take; 0: there is none
        self._can_retry = True  # some request of the last step may have draft tokens
        self._is_sample = False  # nothing is drafted in this step, to measure a plain one
        self._samples_left = 0  # in a row
        self._cold_left = 0  # plain steps after a retry that may take longer
        self._saved_share = 0.0  # of the time per output token, as expected by the last choice; 0: none drafts
        self._num_retried = 0  # requests that draft in this step only because they are tried again
        self._judged: set[str] = set()  # ids of requests about which `share` has decided
        self._num_steps = 0
        self._idle: Sequence[RequestView] | None = None  # the requests of a step, if all of them were off
        self._idle_size, self._idle_curve = 0, curve.seconds  # their number, and by what this was decided
        self._idle_costs = [0.0, 0.0]
        self._new_off: set[tuple[int, int]] = set()  # groups and batch sizes: new requests like these do not draft
        self._held: Held | None = None  # the last choice
        self._past: list[Past] = []  # drafts from which is to be learned
        # Of this step: the requests that draft, and what they may ask.
        self._requests: Sequence[RequestView] = ()
        self._rows = np.empty(0, dtype=np.int64)
        self._worth = ALL  # the share of their accepted draft tokens that other proposers are expected not to have
        self._known: tuple[Sequence[RequestView], np.ndarray] = (), self._rows
        self._limits: Sequence[int] = ()
        self._levels: Levels | None = None
        self._so_far = self._of_drafting = Expected.of_plain(0, 0)
        self._drafted_s = 0.0
        self._began = 0.0  # when the proposer was asked for the step's drafts

    def start(self, request: RequestView, *, is_sampled: bool, may_sample: bool = False) -> None:
        """is_sampled: whether the request has a temperature above 0. may_sample: as in `ProposerBatch`."""
        self.survival.start(request, is_sampled=is_sampled, may_sample=may_sample)

    def finish(self, request: RequestView, *, learns: bool = True) -> None:
        """Forget a request. May be called twice, and for a request that did not start. learns: whether to learn from
        its last drafts; False if their device may have failed."""
        if learns:
            self._learn()
        self.survival.finish(request)
        self._off.discard(request.id)
        self._judged.discard(request.id)
        self._known = (), self._rows
        if self._idle is not None:  # all are still off; a finished request must not be kept alive
            self._idle = []

    def is_off(self, request: RequestView) -> bool:
        """Whether a request does not draft at present. A new request is not expected to either, while no other does.
        Where a plain step is measured, none does: it would take longer if it was observed."""
        if request.id in self._off or (self._is_sample and request.id in self._judged):
            return True
        return self._is_all_off and request.id not in self._judged and not self._retries.is_paid

    def stays_idle(self, requests: Sequence[RequestView], *, is_prefill: bool = False) -> bool:
        """Whether it is already decided that none of these requests drafts in this step. Until one is tried again, only
        the costs of the target's forward pass may change that, or other requests. is_prefill: whether one of them has
        its first forward pass: a new one is decided on in the step after it."""
        if self._idle is None or (self._can_retry and self._retries.is_paid):
            return False
        if self._curve.seconds is not self._idle_curve:
            if not np.allclose(self._costs_of(self._idle_size), self._idle_costs, rtol=SAME):
                self._new_off.clear()
                return False
            self._idle_curve = self._curve.seconds
        if requests == self._idle or (is_prefill and all(map(self.is_off, requests))):
            return True
        return not is_prefill and len(requests) == self._idle_size and self._takes_over(requests)

    def _takes_over(self, requests: Sequence[RequestView]) -> bool:
        """Whether it is known without asking that none of these requests drafts, of which some are new: new requests
        like them did not draft in such a batch, and nothing was learned since. Then it is decided for them."""
        if not self._new_off:
            return False
        size, new = len(requests), [request for request in requests if request.id not in self._judged]
        is_known = all((self.survival.group(request), size) in self._new_off for request in new)
        if not is_known or not all(request.id in self._off for request in requests if request not in new):
            return False
        self._mark_off([request.id for request in requests], [0] * size)
        self._idle = list(requests)
        return True

    def begin_idle(self, requests: Sequence[RequestView]) -> bool:
        """Decide that these requests, of which none drafts in this step, do not draft in the next ones. Returns whether
        that is so: not if nothing is drafted only to measure a plain step."""
        if not self._is_sample:
            self._idle, self._idle_curve = list(requests), self._curve.seconds
            self._idle_size, self._idle_costs = len(requests), self._costs_of(len(requests))
        return not self._is_sample

    def _costs_of(self, number: int) -> list[float]:
        """The seconds of a plain step of so many requests, and of one with a few draft tokens."""
        most = len(self._curve.seconds) - 1
        return [float(self._curve.seconds[min(rows, most)]) for rows in (number, number + RETRY_TOKENS)]

    def pass_idle_step(self) -> None:
        """Note that no proposer was asked in a step."""
        self._held = None  # the next choice is a new one

    def share(self, requests: Sequence[RequestView], limits: Sequence[int], so_far: Expected) -> list[int]:
        """Return the most draft tokens of each request; 0: it does not draft in this step.

        limits: the most draft tokens that each request may have.
        so_far: what the step is expected to yield without drafts of this proposer.
        """
        self._idle = None
        self._so_far, self._num_retried, self._drafted_s, self._is_sample = so_far, 0, 0.0, False
        asked = [request for request, limit in zip(requests, limits, strict=True) if limit]
        self._can_retry = bool(asked)
        if not asked:
            return list(limits)
        most = [limit for limit in limits if limit]
        self._worth = ALL
        if self._wants_plain_step(requests) or self._stays_off(asked, most):
            return [0] * len(limits)
        of_asked = so_far if len(asked) == len(requests) else so_far.only(np.flatnonzero(limits))
        if of_asked.covered is not None:
            self._worth = worth_beside(of_asked.covered, self.survival, self._rows_of(asked))
        numbers = self._with_retries(most, self._numbers(asked, most, of_asked))
        self._requests, self._of_drafting = asked, of_asked
        if not all(numbers):
            drafting = np.flatnonzero(numbers)
            self._requests, self._of_drafting = [asked[i] for i in drafting.tolist()], of_asked.only(drafting)
            self._worth = self._worth[drafting] if so_far.covered is not None else ALL
        self._rows = self._rows_of(self._requests)
        if self._requests:  # what drafting at all costs is decided: further draft tokens need not pay for it
            draft_s = so_far.draft_s + self._observe.seconds(len(self._requests))
            self._so_far = evolve(so_far, draft_s=draft_s)
            self._of_drafting = evolve(self._of_drafting, draft_s=draft_s)
        given = iter(numbers)
        return numbers if len(asked) == len(requests) else [next(given) if limit else 0 for limit in limits]

    def levels(self, limits: Sequence[int], device: torch.device) -> Levels | None:
        """Return the `LevelBudget` for the requests that draft in this step; None on a GPU, where asking it would wait
        for the device. limits: the most draft tokens of each."""
        self._began, self._limits = perf_counter(), limits
        if device.type != "cpu":
            self._levels = None
            return None
        size = len(limits)
        first_s = self._first.seconds(size)
        so_far = evolve(self._of_drafting, draft_s=self._of_drafting.draft_s + first_s)
        # In a retry, and if none was measured lately, levels go on whatever they cost, which is then measured again.
        level_s = 0.0 if self._num_retried else self._level.recent_seconds(size, self._num_steps)
        self._levels = Levels(self._rows, limits, self.survival, self._worth, self._curve.seconds, so_far, level_s)
        return self._levels

    def keep(self, draft: Draft) -> Draft:
        """Return the draft without chosen draft tokens that are not worth verifying. Requests with a sampled one keep
        all of theirs. Remembers the whole draft, to learn from it: draft tokens that are cut may turn out right."""
        levels, size = self._levels, draft.batch_size
        self._asks_levels = levels is not None and levels.first_s is not None
        is_read = draft.is_on_host(draft.scores, draft.parents, draft.q_rows)
        self._judges_nodes = draft.scores is not None and draft.q is None and is_read
        now = perf_counter()
        drafted_s = self._drafted_s = now - self._began
        # q is large, and not looked at.
        whole = draft if draft.q is None else evolve(draft, q=None, q_to_target=None, q_ids=None)
        if draft.num_nodes:
            self._nodes_per_level += NEWEST * (draft.num_nodes / size / max(1, draft.max_depth) - self._nodes_per_level)
            if draft.scores is not None and is_read and self._is_worth_cutting(draft):
                draft = self._cut(draft, drafted_s)
                self._cutting.add(size, perf_counter() - now, self._num_steps)
        if not self._num_retried:
            self._kept_per_draft += NEWEST * (draft.num_nodes / size - self._kept_per_draft)
        num_tokens = [len(request.token_ids) for request in self._requests]
        self._past.append(Past(self._requests, self._rows, num_tokens, self._limits, whole))
        return draft

    def end_drafting(self, seconds: float, late_s: float) -> None:
        """Count the time that a draft took, from `share` to the end of what follows `keep`. seconds: without late
        observations, which took late_s."""
        levels, size, step = self._levels, len(self._requests), self._num_steps
        usual_s = self._first.seconds(size) + RETRY_TOKENS * self._level.seconds(size)
        if levels is None or levels.first_s is None or not levels.num_forwarded:
            self._first.add(size, seconds, step)
        else:
            level_s = (self._drafted_s - levels.first_s) / levels.num_forwarded
            self._first.add(size, seconds - level_s * levels.num_forwarded, step)
            self._level.add(size, level_s, step)
            self._levels_per_draft += NEWEST * (levels.num_forwarded - self._levels_per_draft)
        if self._num_retried:
            seconds = min(seconds, OUTLIER * usual_s) if usual_s else seconds
            more_s = self._curve.more_s(self._so_far.num_rows, self._num_retried * RETRY_TOKENS)
            observing_s = self._observe.seconds(self._num_retried)
            self._retry_s = more_s + seconds * self._num_retried / size + late_s + observing_s

    def after(self, requests: Sequence[RequestView], draft: Draft | None) -> Expected:
        """What the step is expected to yield together with a draft of this proposer. requests, draft: all that are
        scheduled, those that did not draft included; None: none did."""
        so_far = self._so_far
        if draft is None or not draft.num_nodes or not draft.is_on_host(draft.scores, draft.parents, draft.q_rows):
            return so_far
        return expected_with(draft, self._drafted_s, so_far, self.survival, requests)

    def observed(self, num_requests: int, seconds: float) -> None:
        """Count the time that the proposer took for observing requests in a step without prefill."""
        self._observe.add(num_requests, seconds, self._num_steps)

    def end_steps(self, seconds: Sequence[float], num_accepted: int = 0) -> None:
        """Count steps, and the seconds that each took. num_accepted: the accepted draft tokens of the last one."""
        self._num_steps += len(seconds)
        if self._off or self._is_all_off:
            self._retries.pay(sum(seconds))
        self._samples.pay(sum(seconds))
        if self._retry_s:
            self._pay_retry(seconds[-1], num_accepted)
            self._cold_left = NUM_COLD
        elif self._cold_left > 0 and self._is_all_off:
            self._cold_left -= len(seconds)
            plain_s = len(seconds) * float(self._curve.seconds[self._so_far.num_rows])
            self._retries.add(min(max(0.0, sum(seconds) - plain_s), plain_s))

    def _rows_of(self, requests: Sequence[RequestView]) -> np.ndarray:
        if requests != self._known[0]:
            self._known = requests, self.survival.rows(requests)
        return self._known[1]

    def _learn(self) -> None:
        past, self._past = self._past, []  # first: an interrupt must not make the drafts count twice
        if past:
            self._new_off.clear()
            self.survival.learn(past)

    def _numbers(self, requests: Sequence[RequestView], limits: list[int], so_far: Expected) -> list[int]:
        """The most draft tokens of each request, by expected gain; 0: none. so_far: of these requests."""
        held = self._held if so_far.covered is None else None
        if held is not None and held.is_for(requests, limits):
            numbers = held.numbers
            self._held = held._replace(age=held.age + 1)
        else:
            self._learn()
            if held is None:
                self._curve.refresh()
            rows = self._rows_of(requests)
            self.survival.update(rows)
            numbers = self._choose(rows, limits, so_far)
            self._held = Held(requests, list(limits), numbers)
            if so_far.covered is None:
                self._note_new(requests, numbers)
            self._mark_off([request.id for request in requests], numbers)
        if self._asks_levels or self._judges_nodes:
            return [limit if number else 0 for number, limit in zip(numbers, limits, strict=True)]
        return [min(number, limit) for number, limit in zip(numbers, limits, strict=True)]

    def _wants_plain_step(self, requests: Sequence[RequestView]) -> bool:
        """Whether nothing is drafted in this step, so that a plain one is measured: else nothing would show that plain
        decoding has become faster than it seems."""
        number = len(requests)
        may_sample = self._saved_share > 0 and self._so_far.num_rows == number
        if may_sample and self._samples.is_paid and self._curve.is_out_of_date(number):
            self._samples_left = NUM_SAMPLES
            plain_s = float(self._curve.seconds[number]) + self._so_far.draft_s
            lost_s = NUM_SAMPLES * plain_s * (self._saved_share + COLD)
            self._samples.add(lost_s * min(max(1.0, self._saved_share / CLOSE), MOST_RARER))
        self._is_sample = may_sample and self._samples_left > 0
        self._samples_left -= self._is_sample
        if self._is_sample:  # then new ones are not observed either
            self._judged.update(request.id for request in requests)
        return self._is_sample

    def _stays_off(self, requests: Sequence[RequestView], limits: list[int]) -> bool:
        """Whether none of these requests drafts, since none did lately without the drafts of other proposers, which can
        only lower the gain."""
        held = self._held
        if self._so_far.covered is None or held is None or any(held.numbers) or self._retries.is_paid:
            return False
        if not held.is_for(requests, limits):
            return False
        self._held = held._replace(age=held.age + 1)
        return True

    def _choose(self, rows: np.ndarray, limits: list[int], so_far: Expected) -> list[int]:
        num_requests, size = len(limits), max(1, round(self._nodes_per_level))
        found = self.survival.of_any(rows)  # it pays for draft tokens only where there are any
        level_s = self._level.seconds(num_requests)
        first_s = self._first.seconds(num_requests) + self._observe.seconds(num_requests)
        first_s += self._curve.empty_s * float(1 - found.mean())
        if self._asks_levels:  # whether to draft, and with as many levels as usual
            gains = self.survival.of_depths(rows, min(max(limits), MOST_CHOSEN)).cumprod(axis=1)
            gains = (gains * (np.arange(gains.shape[1]) < np.array(limits)[:, None])).sum(axis=1, keepdims=True)
            sizes, first_s, level_s = self._kept_per_draft * found, first_s + level_s * self._levels_per_draft, 0.0
        else:
            num_levels = min(ceil(max(limits) / size), MOST_CHOSEN)
            gains = self.survival.of_levels(rows, 0, num_levels).cumprod(axis=1)
            gains *= size * np.arange(num_levels) < np.array(limits)[:, None]
            sizes, first_s = size * found, first_s - level_s
        gains *= (self._worth * found)[:, None]
        chosen, saved = best_levels(gains, sizes, so_far, self._curve.seconds, first_s, level_s)
        self._saved_share = saved if saved > (TO_START if self._is_all_off else TO_GO_ON) else 0.0
        if not self._saved_share:
            return [0] * num_requests
        if self._asks_levels:
            return [self._most if number else 0 for number in chosen.tolist()]
        return [self._most if number == MOST_CHOSEN else number * size for number in chosen.tolist()]

    def _note_new(self, requests: Sequence[RequestView], numbers: list[int]) -> None:
        for request, number in zip(requests, numbers, strict=True):
            if request.id not in self._judged:
                kind = self.survival.group(request), len(requests)
                (self._new_off.discard if number else self._new_off.add)(kind)

    def _mark_off(self, ids: list[str], numbers: list[int]) -> None:
        self._judged.update(ids)
        off = {request_id for request_id, number in zip(ids, numbers, strict=True) if not number}
        self._off = (self._off - set(ids)) | off
        self._is_all_off = len(off) == len(ids)

    def _with_retries(self, limits: list[int], numbers: list[int]) -> list[int]:
        """If enough time has passed, let the requests that are off draft a few tokens."""
        if all(numbers) or not self._retries.is_paid:
            return numbers
        self._num_retried = numbers.count(0)
        return [number or min(limit, RETRY_TOKENS) for number, limit in zip(numbers, limits, strict=True)]

    def _pay_retry(self, step_s: float, num_accepted: int) -> None:
        """Charge the requests that were tried again for what the step took longer than a plain one, less the time that
        their accepted draft tokens saved: their part of both. step_s, num_accepted: of the step."""
        so_far, share, expected_s = self._so_far, self._num_retried / len(self._requests), self._retry_s
        self._retry_s = 0.0
        if so_far.covered is not None:  # then it is not known whose draft tokens were accepted
            self._retries.add(expected_s)
            return
        plain_s = float(self._curve.seconds[so_far.num_rows]) + so_far.draft_s
        lost_s = min(max(expected_s, share * (step_s - plain_s)), OUTLIER * expected_s)
        self._retries.add(max(0.0, lost_s - share * num_accepted * plain_s / len(so_far.tokens)))

    def _is_worth_cutting(self, draft: Draft) -> bool:
        """Whether the forward pass takes so much longer with the draft tokens that judging them one by one pays. Now
        and then they are judged anyway, to keep measuring how long that takes."""
        if self._num_steps % NUM_BETWEEN_CUTS == 0:
            return True
        more_s = self._curve.more_s(self._so_far.num_rows, draft.num_nodes)
        return more_s > LEAST_RATIO * self._cutting.seconds(draft.batch_size)

    def _cut(self, draft: Draft, drafted_s: float) -> Draft:
        nodes = Nodes.of(draft)
        assert nodes.scores is not None
        has_sampled = np.zeros(draft.batch_size, dtype=bool)
        has_sampled[nodes.requests[nodes.is_first]] = True
        whole = has_sampled[nodes.requests]
        own = self.survival.of_nodes(self._rows[nodes.requests], nodes.scores, nodes.is_first)
        gains = nodes.down_the_tree(np.where(nodes.depths > 0, own, 0))
        gains *= np.broadcast_to(self._worth, draft.batch_size)[nodes.requests]
        so_far = Expected(
            self._of_drafting.tokens + np.bincount(nodes.requests, np.where(whole, gains, 0), draft.batch_size),
            self._of_drafting.num_rows + int(whole.sum()),
            self._of_drafting.draft_s + drafted_s,
            others=self._of_drafting.others,
        )
        kept = best_nodes(np.where(whole, 0, gains), nodes.requests, so_far, self._curve.seconds) | whole
        if self._in_place:
            last = np.full(draft.batch_size, -1)
            np.maximum.at(last, nodes.requests[kept], np.flatnonzero(kept))
            kept = np.arange(len(kept)) <= last[nodes.requests]
        return draft if kept.all() else without(draft, nodes, kept)
