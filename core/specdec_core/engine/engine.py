"""The loop: schedule, propose, forward, verify, commit, observe, emit."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from threading import Lock
from time import perf_counter
from typing import Any
from weakref import finalize

import torch
from attrs import evolve

from specdec_core import ops
from specdec_core.config import EngineConfig, SpeculativeConfig
from specdec_core.engine.admission import check_params, checked_prompt, checked_rules
from specdec_core.engine.budget import DraftBudget
from specdec_core.engine.costs import CostMeter
from specdec_core.engine.draft_model import load_draft_model
from specdec_core.engine.logprobs import TokenTexts, add_prompt_logprobs, output_logprobs, prompt_parts, rows_of
from specdec_core.engine.memory import plan_memory
from specdec_core.engine.request import Listener, Piece, Request
from specdec_core.engine.scheduler import Schedule, Scheduler
from specdec_core.engine.speculation import PLAIN, Speculation, built, planned
from specdec_core.engine.step_batch import StepBatch
from specdec_core.engine.text import OutputText
from specdec_core.engine.verification import Verification
from specdec_core.errors import PluginError, SpecdecError
from specdec_core.ops.padding import Padding
from specdec_core.plugins import Plugins
from specdec_core.proposer import BuildContext
from specdec_core.sampling.logprobs import TokenLogprobs
from specdec_core.sampling.process import process_logits
from specdec_core.sampling.random import CounterRandom
from specdec_core.sampling.rules import RuledRows, why_not_finite
from specdec_core.sampling_params import SamplingParams
from specdec_core.target import Target
from specdec_core.target.attention import PagedAttention
from specdec_core.target.load import find_device
from specdec_core.target.model import speed_up
from specdec_core.types import Draft, StepReport, Verdict


class Engine:
    """Runs requests to their end, a step at a time: continuous batching, with or without speculation.

    One thread at a time may use it. Listeners may call anything: they are told between steps. An exception inside a
    step aborts the running requests, whose state it may have left halfway; those that wait go on with the next step.
    An engine that nobody closes closes its proposer when it is collected, or else at the interpreter's exit.

    plugins: where proposers, verifiers, KV managers and operations come from. tokenizer: None: token ids alone.
    """

    def __init__(
        self,
        config: EngineConfig,
        plugins: Plugins,
        speculative_config: SpeculativeConfig | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._device = find_device(config.device)
        self.target = Target(
            config.model,
            device=self._device,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            trust_remote_code=config.trust_remote_code,
            revision=config.revision,
            code_revision=config.code_revision,
            quantization=config.quantization,
        )
        spec, options, num_speculative_tokens, most_requests = PLAIN, None, 0, None
        if speculative_config is not None:
            spec, options = plugins.proposer(speculative_config.method), speculative_config.options
            num_speculative_tokens = speculative_config.num_speculative_tokens
            most_requests = speculative_config.disable_by_batch_size
        info = evolve(self.target.info, trust_remote_code=config.trust_remote_code, tokenizer=tokenizer)
        plan = planned(spec, options, info, num_speculative_tokens)
        self._budget = DraftBudget(num_speculative_tokens, most_requests, plan.max_model_len)
        layouts = [self.target.kv_layout, *([plan.kv_layout] if plan.kv_layout else [])]
        memory = plan_memory(
            config, self.target.kv_layout, plan, max_model_len=self.target.info.max_model_len, device=self._device
        )
        self.kv = plugins.kv_manager("paged").build(memory.num_blocks, config.block_size, self._device)
        groups = [self.kv.add_group(layout) for layout in layouts]
        resolved = ops.resolve(plugins.ops(self._device.type))
        attention = PagedAttention(self.kv, groups[0], resolved, Padding.of(self._device))
        self.target.attach(attention, resolved, plan)

        of_draft = attention.of_group(groups[1]) if plan.kv_layout else None
        context = BuildContext(
            target=info,
            num_speculative_tokens=num_speculative_tokens,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            device=self._device,
            embed=self.target.embed,
            output_head=self.target.output_head,
            output_rows=self.target.output_rows,
            attention=of_draft,
            load_model=partial(load_draft_model, target=info, attention=of_draft, ops=resolved),
            speed_up=partial(speed_up, ops=resolved),
        )
        self._speculation = Speculation(
            built(spec, options, context),
            spec.name,
            observes=plan.observes,
            vocab_size=self.target.info.vocab_size,
            device=self._device,
        )
        self._abandoned = finalize(self, self._speculation.abandon)
        self._scheduler = Scheduler(
            self.kv,
            self._budget,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            scratch_slots=plan.scratch_slots,
        )
        self._verification = Verification(plugins, speculative_config)
        self._meter = CostMeter()
        self._step_finished = plugins.step_finished
        self._tokenizer = tokenizer
        self._token_texts = TokenTexts(tokenizer)
        self._requests: dict[str, Request] = {}
        self._news: deque[tuple[Listener | None, Request, Sequence[Piece]]] = deque()  # yet to be told
        self._turn = Lock()  # held by a step or a cancellation
        self._cancelled: list[str] = []  # meanwhile: a generator that is collected may cancel at any moment
        self._ids = count()
        self._seeds = random.Random(config.seed)

    @property
    def num_speculative_tokens(self) -> int:
        """Most draft tokens of a request in a step; 0 without speculation."""
        return self._budget.num_speculative_tokens

    @property
    def is_closed(self) -> bool:
        return not self._abandoned.alive

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
    ) -> str:
        """Queue a request and return its id.

        listener(request, pieces) hears each step's new tokens, with their text if is_streamed; at the last call
        request.finish_reason is set. Raises ConfigError or CapacityError, touching no other request; SpecdecError once
        the engine is closed.
        """
        self._check_open()
        token_ids = checked_prompt(prompt_token_ids, self.target.info)
        check_params(params, self.num_speculative_tokens, self.target.info, has_text=self._tokenizer is not None)
        self._verification.check(params)
        rules = checked_rules(params, self._tokenizer, self.target.eos_token_ids, self.target.info)
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
            rules=rules,
            text=text,
            listener=listener,
            is_streamed=is_streamed,
            is_lossless=self._verification.is_lossless,
        )
        self._requests[request_id] = request
        self._scheduler.waiting.append(request)
        return request_id

    def cancel(self, request_id: str) -> None:
        """End a request now, with finish_reason "abort" and what it has so far. Ids of ended requests are ignored."""
        with self._in_turn() as has_turn:
            if not has_turn:
                self._cancelled.append(request_id)
            if not has_turn or request_id not in self._requests:
                return
            self._finish(self._requests[request_id], "abort")
        self._tell()

    def close(self) -> None:
        """End all requests, with finish_reason "abort", and close the proposer. It may be called again.

        Raises PluginError if the proposer fails in it; everything is closed then, too.
        """
        with ExitStack() as ending:
            ending.callback(self._tell)
            with self._in_turn() as has_turn, ExitStack() as closing:
                if not has_turn:
                    raise SpecdecError("a step is under way in another thread: end what it runs before you close it")
                if self._abandoned.detach() is not None:
                    closing.callback(self._speculation.close)
                for request in list(self._requests.values()):
                    closing.callback(self._finish, request, "abort")

    @torch.inference_mode()
    def step(self) -> StepReport:
        """One pass of the target over whatever is most urgent; none if there is nothing to do."""
        self._check_open()
        with self._in_turn() as has_turn:
            if not has_turn:
                raise SpecdecError("a step is under way in another thread: use an engine from one thread at a time")
            report = self._step()
        cancelled, self._cancelled = self._cancelled, []
        for request_id in cancelled:
            self.cancel(request_id)
        self._tell()
        if self._step_finished is not None:
            self._step_finished(report)
        return report

    def _step(self) -> StepReport:
        schedule = self._scheduler.schedule()
        self._speculation.announce(schedule)
        if not schedule.requests:
            return StepReport(num_preempted=len(schedule.preempted))
        started = perf_counter()
        draft = self._speculation.propose(schedule, self._meter.costs)
        drafted = perf_counter()
        batch, logits, features = self._forward(schedule, draft)
        verifier = self._verification.choose(draft, [request.params for request in schedule.requests])
        verdict = self._verify(verifier, schedule, batch, draft, logits).on_host()
        self.kv.commit(schedule.request_ids, schedule.num_known, verdict)
        token_ids = verdict.token_ids.tolist()
        logprobs = output_logprobs(schedule.requests, verdict, token_ids, logits, self._token_texts)
        verified = perf_counter()
        self._speculation.observe(schedule, batch, draft, verdict, features)
        observed = perf_counter()
        draft_s, target_s = drafted - started + observed - verified, verified - drafted
        num_prefill_tokens = schedule.num_prefill_tokens
        if not num_prefill_tokens:
            self._meter.add(target_s, draft.num_nodes + len(schedule.requests))
        num_decode_requests = sum(request.is_decoding for request in schedule.requests)
        emitted, accepted = self._emit(schedule, draft, token_ids, logprobs)
        return StepReport(
            num_prefill_tokens=num_prefill_tokens,
            num_decode_requests=num_decode_requests,
            num_output_tokens=sum(emitted.values()),
            num_draft_tokens=draft.num_nodes,
            num_accepted=sum(accepted.values()),
            draft_s=draft_s,
            target_s=target_s,
            num_preempted=len(schedule.preempted),
            accepted_per_request=accepted,
            output_per_request=emitted,
            verifier=verifier if draft.num_nodes else "",
        )

    def _forward(self, schedule: Schedule, draft: Draft) -> tuple[StepBatch, torch.Tensor, dict[str, torch.Tensor]]:
        num_padded = self.target.attention.padded(sum(schedule.num_known) + draft.num_nodes)
        batch = StepBatch.of(schedule, draft, num_padded, self._device)
        starts = [request.num_computed for request in schedule.requests]
        metadata = self.kv.metadata(schedule.request_ids, starts, batch.lengths)
        parts = prompt_parts(schedule, batch)
        rows = torch.cat([batch.rows, rows_of(parts, self._device)]) if parts else batch.rows
        logits, features = self.target.forward(batch.token_ids, batch.positions, metadata, batch.visibility, rows)
        if parts:
            logits, of_prompts = logits[: len(batch.rows)], logits[len(batch.rows) :]
            add_prompt_logprobs(parts, of_prompts, self._token_texts)
        return batch, logits, features

    def _verify(
        self, verifier: str, schedule: Schedule, batch: StepBatch, draft: Draft, logits: torch.Tensor
    ) -> Verdict:
        params = [request.params for request in schedule.requests]
        noise = CounterRandom([request.seed for request in schedule.requests], batch.root_positions)
        rules = RuledRows.of(schedule.whole_requests, draft)
        processed = process_logits(logits, draft.layout.row_requests, params, rules)
        return self._verification.verify(verifier, processed, draft, noise)

    def _emit(
        self,
        schedule: Schedule,
        draft: Draft,
        token_ids: list[list[int]],
        logprobs: dict[str, list[TokenLogprobs]],
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Append each request's tokens and end it where it stops. Returns how many were emitted, for each request that
        got some, and how many of those were draft tokens, for each request that had a draft."""
        emitted: dict[str, int] = {}
        accepted: dict[str, int] = {}
        for request, num_known, num_nodes, padded in zip(
            schedule.requests, schedule.num_known, draft.num_nodes_per_request, token_ids, strict=True
        ):
            tokens = [token for token in padded if token >= 0]
            if not tokens:
                self._fail(request, had_draft=num_nodes > 0)
                continue
            if request.num_computed + num_known < request.num_tokens:
                request.num_computed += num_known  # more of the prompt is to come: what follows is known already
                continue
            request.num_computed += num_known + len(tokens) - 1
            eos_token_ids = self.target.eos_token_ids
            pieces = request.append(tokens, len(tokens) - 1, eos_token_ids, logprobs.get(request.id, ()))
            emitted[request.id] = len(pieces)
            if num_nodes:
                accepted[request.id] = sum(piece.is_draft for piece in pieces)
                request.counts.add(num_nodes, accepted[request.id])
            if request.finish_reason is None:
                self._news.append((request.listener, request, pieces))
            else:
                self._finish(request, request.finish_reason, pieces)
        return emitted, accepted

    def _fail(self, request: Request, *, had_draft: bool) -> None:
        """Its logits were not finite, as the target gave them or as its sampling parameters left them. A draft node may
        have been the cause, so it ends only if they are not without a draft either: it starts over without any."""
        if not had_draft:
            request.error = why_not_finite(request.rules)
            self._finish(request, "error")
            return
        request.may_draft = False
        self._scheduler.preempt(request)
        self._speculation.reset(request)

    def _finish(self, request: Request, reason: str, pieces: Sequence[Piece] = ()) -> None:
        request.finish(reason)
        self._scheduler.remove(request)
        del self._requests[request.id]
        self._news.append((request.listener, request, pieces))
        request.listener = None  # it may lead back to this engine, and a proposer may hold the last requests
        self._speculation.finish(request, reason)

    def _tell(self) -> None:
        """Call the listeners. One that raises leaves the rest of the news for the next time."""
        while self._news:
            listener, request, pieces = self._news.popleft()
            if listener is not None:
                listener(request, pieces)

    def _check_open(self) -> None:
        if self.is_closed:
            raise SpecdecError("this engine was closed, as its LLM was: make another one")

    @contextmanager
    def _in_turn(self) -> Iterator[bool]:
        """Whether nobody else has the turn. What is raised by whoever has it aborts the running requests."""
        has_turn = self._turn.acquire(blocking=False)
        try:
            yield has_turn
        except BaseException:
            if has_turn:
                self._abort_running()
            raise
        finally:
            if has_turn:
                self._turn.release()

    def _abort_running(self) -> None:
        for request in [r for r in self._requests.values() if r.is_started or r in self._scheduler.running]:
            with suppress(PluginError):
                self._finish(request, "abort")
