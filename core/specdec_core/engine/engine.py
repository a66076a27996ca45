"""The engine's loop: schedule, draft, run the target, verify, compact the KV cache, show hidden states, emit tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from threading import Lock
from typing import Any, Self, TypeVar
from weakref import finalize

import torch

from specdec_core.config.engine import EngineConfig
from specdec_core.config.sampling import SamplingParams
from specdec_core.config.structured_outputs import StructuredOutputs
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.report import StepReport
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.build import Parts, build_parts
from specdec_core.engine.design import Speculating
from specdec_core.engine.detokenizer import OutputText
from specdec_core.engine.device import failure_of, use_device
from specdec_core.engine.forced import forced_tokens
from specdec_core.engine.interrupts import then
from specdec_core.engine.logprobs import output_logprobs
from specdec_core.engine.metrics import Load
from specdec_core.engine.news import News
from specdec_core.engine.request import Listener, Request
from specdec_core.engine.request_checks import (
    check_params,
    check_salt,
    make_constraints,
    parse_prediction,
    parse_prompt,
)
from specdec_core.engine.runner import Computed
from specdec_core.engine.scheduler import Schedule
from specdec_core.engine.step_report import Emitted, StepTimer
from specdec_core.engine.verification import StepTrace
from specdec_core.errors import DeviceError, SpecdecError
from specdec_core.models.load import find_device
from specdec_core.plugins import Plugins
from specdec_core.sampling.constraints import why_not_finite

T = TypeVar("T")


class Engine:
    """Runs requests step by step: continuous batching, with or without speculation.

    Only one thread at a time may use it. Listeners (callbacks that receive a request's output) are called between steps
    and may call any method of the engine.

    An exception inside a step aborts the running requests, since their state may be inconsistent; waiting requests go
    on with the next step. An interrupt (Ctrl-C) counts as an exception. If a second interrupt stops the cleanup, the
    next step completes the cleanup.

    If the device fails for good, the step raises DeviceError and all requests end. After that, every call except
    `cancel` and `close` raises DeviceError. An engine that is not closed closes its proposers when it is
    garbage-collected or when the interpreter exits.

    longest_step_s: an estimate of the longest step in seconds, which computes max_num_batched_tokens tokens of prompts:
        from the time of a short prompt when the engine was built. Attention to long contexts comes on top.

    tracer: called in each step, between verification and output, with a `StepTrace`, and for nothing else. None: steps
        are not traced. A trace has a distribution over the vocabulary for each draft token, so it is for looking at
        single requests.

    step_finished: told of each step.
    """

    def __init__(self, parts: Parts, step_finished: Callable[[StepReport], object] | None = None) -> None:
        self._device, self._step_finished = find_device(parts.config.device), step_finished
        self.target, self.kv = parts.target, parts.kv
        self.num_speculative_tokens = parts.num_speculative_tokens  # per request and step; 0: plain decoding
        self.max_num_seqs = parts.config.max_num_seqs
        self.longest_step_s = parts.longest_step_s
        self._num_kv_blocks = parts.num_kv_blocks
        self._scheduler, self._speculation = parts.scheduler, parts.speculation
        self._runner, self._verification = parts.runner, parts.verification
        self._tokenizer, self._token_texts, self._grammars = parts.tokenizer, parts.token_texts, parts.grammars
        self.tracer: Callable[[StepTrace], None] | None = None
        self._abandoned = finalize(self, self._speculation.abandon)
        self._sharing = parts.sharing
        self._requests: dict[str, Request] = {}
        self._news = News()
        self._step_lock = Lock()  # held by a step or a cancellation
        self._cancelled: dict[str, None] = {}  # to be ended: a generator that is collected may cancel within a step
        self._failure: DeviceError | None = None
        self._is_halfway = False  # in a step or its cleanup; still True later if an interrupt broke it off
        self._ids = count()
        self._seeds = random.Random(parts.config.seed)

    @classmethod
    def build(
        cls, config: EngineConfig, plugins: Plugins, speculative_config: Speculating = None, tokenizer: Any = None
    ) -> Self:
        """Build the parts of an engine, and the engine. Raises the errors of `build_parts`.

        plugins: provide proposers, verifiers, KV managers and operations.
        tokenizer: None: requests and outputs are token ids only.
        """
        with use_device(find_device(config.device)):
            parts = build_parts(config, plugins, speculative_config, tokenizer, engine_of=cls)
        return cls(parts, plugins.step_finished)

    @property
    def load(self) -> Load:
        """How busy the engine is at the moment, and the proposers' own metrics. Raises PluginError if a proposer fails
        to tell its metrics."""
        if not self.is_closed and not self.is_dead:
            self._clean_up()
        kv_usage = 1 - self.kv.num_free_blocks / self._num_kv_blocks
        num_running, num_waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        return Load(num_running, num_waiting, kv_usage, self._speculation.metrics())

    @property
    def is_closed(self) -> bool:
        return not self._abandoned.alive

    @property
    def is_dead(self) -> bool:
        """Whether the device has failed for good: only a new process can use it again. `failure` is the error."""
        return self._failure is not None

    @property
    def failure(self) -> DeviceError | None:
        """The error if the device has failed or another rank has ended, else None. The `__cause__` of a device's is the
        exception that the device or a plugin's code raised."""
        return self._failure or self._sharing.failure()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self._requests

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        listener: Listener | None = None,
        *,
        is_streamed: bool = False,
        cache_salt: str = "",
    ) -> str:
        """Queue a request and return its id.

        listener: called as listener(request, pieces) after each step that adds output to the request. The pieces are
            the new tokens, with their text if is_streamed. At the last call request.finish_reason is set.
        cache_salt: requests share cached keys and values only if their salts are equal.

        Raises ConfigError or CapacityError without affecting other requests; SpecdecError once the engine is closed,
        DeviceError once the device has failed.
        """
        self._check_open()
        self._clean_up()
        token_ids = parse_prompt(prompt_token_ids, self.target.info)
        check_salt(cache_salt)
        methods = [drafter.proposer.name for drafter in self._speculation.drafters]
        check_params(
            params, self.num_speculative_tokens, methods, self.target.info, has_text=self._tokenizer is not None
        )
        self._verification.check(params)
        wanted_methods = methods if params.speculative_methods is None else params.speculative_methods
        reading = {each.proposer.name for each in self._speculation.drafters if each.plan.reads_prediction}
        is_read = not reading.isdisjoint(wanted_methods)
        prediction = parse_prediction(params.prediction, self._tokenizer, self.target.info, is_read=is_read)
        constraints = make_constraints(
            params, self._tokenizer, self.target.eos_token_ids, self.target.info, self._grammars
        )
        request_id = f"request-{next(self._ids)}"
        limit = self.target.info.max_model_len
        wanted = limit if params.max_tokens is None else len(token_ids) + params.max_tokens
        text = None
        if self._tokenizer is not None and params.detokenize:
            text = OutputText(self._tokenizer, token_ids, params)
        request = Request(
            request_id,
            token_ids,
            params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_total_tokens=min(limit, wanted),
            constraints=constraints,
            text=text,
            is_streamed=is_streamed,
            is_lossless=self._verification.is_lossless(params),
            cache_salt=cache_salt,
            prediction=prediction,
        )
        if listener is not None:
            self._news.listen(request_id, listener)
        self._requests[request_id] = request
        self._scheduler.waiting.append(request)
        return request_id

    def compile_ahead(self, wanted: StructuredOutputs) -> None:
        """Compile the grammar of requests that are yet to come. Any thread may call this. Raises ConfigError if the
        grammar is wrong or nothing can compile it."""
        self._grammars.compile_ahead(wanted)

    def cancel(self, *request_ids: str) -> None:
        """End requests with finish_reason "abort". They keep their output so far, and end now, or after the step that
        is running. Ids of ended requests are ignored. If a proposer fails, all requests still end, and PluginError is
        raised."""
        self._cancelled.update(dict.fromkeys(filter(self.is_unfinished, request_ids)))
        if self._cancelled and not self._step_lock.locked():
            self._exclusively(self._end_cancelled)
            self._news.tell()

    def close(self) -> None:
        """End all requests with finish_reason "abort", and close the proposers. A second call does nothing.

        If a proposer fails, everything is still closed, and PluginError is raised. Once the device has failed, a
        proposer's failure is only a warning, since its data on the device is lost. Raises SpecdecError while a step
        runs in another thread.
        """
        if self._step_lock.locked():
            raise SpecdecError("a step is under way in another thread: end what it runs before you close it")
        with ExitStack() as ending:
            ending.callback(self._news.tell)
            with self._step_lock, use_device(self._device), ExitStack() as closing:
                closing.callback(self._sharing.close)
                closing.callback(self._close_proposer)
                for request in list(self._requests.values()):
                    closing.callback(self._finish, request, "abort")

    def forget(self) -> None:
        """Let the proposers forget what earlier requests showed, such as their outputs. Raises SpecdecError while a
        request is unfinished."""
        self._check_open()
        self._clean_up()
        if self.has_unfinished:
            raise SpecdecError("a request is unfinished: complete or cancel it before the proposers forget")
        self._exclusively(self._speculation.forget)

    @torch.inference_mode()
    def step(self) -> StepReport:
        """Run one step: one forward pass of the target over the requests that the scheduler selects. If it selects no
        request, there is no forward pass."""
        self._check_open()
        if self._step_lock.locked():
            raise SpecdecError("a step is under way in another thread: use an engine from one thread at a time")
        self.cancel()  # requests whose cancellation an interrupt broke off
        report = self._exclusively(self._step)
        self.cancel()  # requests that were cancelled during the step
        self._news.tell()
        if self._step_finished is not None:
            self._step_finished(report)
        return report

    def _step(self) -> StepReport:
        timer = StepTimer()
        self._end_lost()
        schedule = self._scheduler.schedule()
        self._speculation.announce(schedule)
        if not schedule.requests:
            return StepReport(num_preempted=len(schedule.preempted))
        timer.end_other()
        draft = self._speculation.propose(schedule)
        timer.end_drafting()
        computed = self._runner.run(schedule, draft)
        timer.end_forward_pass()
        decision = self._verification.decide(schedule, draft, computed)
        timer.end_verification()
        if self.tracer is not None:
            probs = self._verification.target_probs(schedule, draft, computed)
            own_drafts = self._speculation.own_drafts
            self.tracer(StepTrace(schedule.request_ids, own_drafts, draft, decision.verdict, probs))
            timer.leave_out()
        self.kv.compact(schedule.request_ids, schedule.num_known, decision.verdict)
        timer.end_other()
        self._speculation.observe(schedule, computed, draft, decision.verdict)
        timer.end_drafting()
        accepted_by = self._speculation.accepted_by(decision.verdict)
        emitted = self._emit(schedule, computed, draft, decision.verdict, accepted_by)
        self._speculation.count(schedule.request_ids, accepted_by, emitted.accepted)
        report = timer.report(schedule, draft, decision.verifier, emitted)
        self._speculation.end_step(report)
        return report

    def _emit(
        self,
        schedule: Schedule,
        computed: Computed,
        draft: Draft,
        verdict: Verdict,
        accepted_by: Mapping[str, Sequence[int]],
    ) -> Emitted:
        """Append each request's verified tokens up to its first stop, and finish the requests that stop or fail.
        Returns what was emitted. The verdict (the result of verification) is on the host.

        accepted_by: {method: of each request, how many of the first accepted draft tokens the method has drafted}.
        """
        emitted = Emitted()
        token_ids = verdict.token_ids.tolist()
        logprobs = output_logprobs(schedule.requests, verdict, token_ids, computed.logits, self._token_texts)
        counts: list[int] = []  # for each request, how many slots became final
        for index, (request, num_known, num_nodes, num_draft_tokens, padded) in enumerate(
            zip(
                schedule.requests,
                schedule.num_known,
                draft.num_nodes_per_request,
                draft.num_live_per_request,
                token_ids,
                strict=True,
            )
        ):
            tokens = [token for token in padded if token >= 0]
            is_chunk = request.num_computed + num_known < request.num_tokens  # the next token is known already
            counts.append(num_known + len(tokens) - 1 if tokens and not is_chunk else num_known if tokens else 0)
            request.num_computed += counts[-1]
            if tokens and not is_chunk:
                eos_token_ids = self.target.eos_token_ids
                own = {method: numbers[index] for method, numbers in accepted_by.items()}
                pieces = request.append(tokens, len(tokens) - 1, eos_token_ids, logprobs.get(request.id, ()), own)
                if request.finish_reason is None:
                    pieces += request.append(forced_tokens(request), 0, eos_token_ids)
                emitted.add(request, pieces, num_draft_tokens)
                self._news.add(request, pieces)
            elif not tokens:
                emitted.failed[request.id] = num_nodes > 0  # dead nodes are computed, too
        self.kv.advance(schedule.requests, counts)
        for request in schedule.requests:
            self._settle(request, emitted)
        return emitted

    def _settle(self, request: Request, emitted: Emitted) -> None:
        """Finish a request if it has stopped, or call `_fail` if its logits were not finite."""
        if request.id in emitted.failed:
            self._fail(request, had_draft=emitted.failed[request.id])
        elif request.finish_reason is not None:
            self._finish(request, request.finish_reason)

    def _fail(self, request: Request, *, had_draft: bool) -> None:
        """Handle a request whose logits (raw or processed) were not finite. With a draft, a draft token may be the
        cause, so the request starts over and gets no more drafts. Without one, the request ends with an error."""
        if not had_draft:
            request.error = why_not_finite(request.constraints)
            self._finish(request, "error")
            return
        request.may_draft = False
        self._scheduler.preempt(request)
        self._speculation.reset(request)

    def _finish(self, request: Request, reason: str) -> None:
        """End a request and remove it from the engine, even if its text cannot be decoded or a proposer fails. The
        removal from `_requests` comes last: if an interrupt (Ctrl-C) stops this method earlier, the request is still
        listed there, and the engine calls the method for it again."""
        with then(lambda: self._forget(request)), ExitStack() as ending:
            ending.callback(self._speculation.finish, request, reason)
            ending.callback(self._news.add, request, ())
            request.finish(reason)

    def _forget(self, request: Request) -> None:
        self._scheduler.remove(request)
        self._requests.pop(request.id, None)

    def _end_lost(self) -> None:
        """Abort requests that are neither waiting nor running in the scheduler, because an interrupt (Ctrl-C) stopped
        `add_request`."""
        if len(self._requests) != self._scheduler.num_requests:
            for request in set(self._requests.values()).difference(self._scheduler.waiting, self._scheduler.running):
                self._finish(request, "abort")

    def _end_cancelled(self) -> None:
        """End all cancelled requests, even if ending one of them raises."""
        with ExitStack() as ending:
            for request_id in tuple(self._cancelled):
                ending.callback(self._end, request_id)

    def _clean_up(self) -> None:
        """End what an interrupt (Ctrl-C) has left halfway, and requests whose cancellation it broke off."""
        if (self._is_halfway or self._cancelled) and not self._step_lock.locked():
            self._exclusively(self._end_cancelled)

    def _end(self, request_id: str) -> None:
        with then(lambda: self._cancelled.pop(request_id, None)):
            if request_id in self._requests:
                self._finish(self._requests[request_id], "abort")

    def _close_proposer(self) -> None:
        if self._abandoned.detach() is None:
            return
        if self.is_dead:
            self._speculation.abandon()
        else:
            self._speculation.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise DeviceError(str(self._failure)) from self._failure.__cause__
        if self.is_closed:
            raise SpecdecError("this engine was closed, as its LLM was: make another one")

    def _exclusively(self, work: Callable[[], T]) -> T:
        """Call `work` with the step lock held and the device current, and return its result. An exception aborts the
        running requests, or all requests if the device has failed.

        The lock is taken by a `with` statement, so that an interrupt (Ctrl-C) cannot leave it locked.
        """
        with self._step_lock, use_device(self._device):
            if self._is_halfway:
                self._abort_running()
            self._is_halfway = True
            try:
                result = work()
            except BaseException as error:
                self._failure = self._failure or failure_of(self._device, error)
                self._abort_running()
                if self._failure is not None:
                    raise self._failure from self._failure.__cause__
                raise
            self._is_halfway = False
            return result

    def _abort_running(self) -> None:
        """End all requests that a step may have touched: all except those that wait for their first step. If the device
        has failed, end all."""
        waiting = set() if self.is_dead else set(self._scheduler.waiting)
        for request in list(self._requests.values()):
            if request not in waiting or request.is_started or request.finish_reason is not None:
                if self._failure is not None:
                    request.error = str(self._failure)
                with suppress(Exception):  # once a device has failed, many calls raise
                    self._finish(request, request.finish_reason or ("error" if self.is_dead else "abort"))
        self._is_halfway = False
