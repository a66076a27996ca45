"""Whatever happens to the rows of vLLM's batch, drafts are those of a proposer that is told the requests' ids."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
from attrs import define, field
from hypothesis import given, settings
from vllm_stand_in import NOISE, PersistentBatch, vllm_config

from specdec_core import TokenDrafter, TokenRequest
from specdec_vllm import Proposer
from specdec_vllm.proposer import _target

NUMBER, ROWS = 3, 5
PROMPTS = ([10, 1, 2], [11, 1, 2], [11], [10, 1, 2, 1, 2], [12, 3, 3, 1])
"""No output is such a prompt or begins with one: the target generates tokens below 6, and 10 to 12 are the users'."""


def next_token(text: list[int]) -> int:
    """The target, which often repeats itself."""
    return (3 * text[-1] + 5 * text[len(text) // 2] + len(text) // 7) % 6


@define(eq=False)
class Request:
    id: int
    text: list[int]
    max_tokens: int
    num_prompt_tokens: int = field()
    num_chunks: int = 0  # steps that compute the prompt and sample nothing
    drafted: list[int] = field(factory=list)
    seen: TokenRequest | None = None  # by the proposer that is told ids

    @num_prompt_tokens.default
    def _all(self) -> int:
        return len(self.text)

    @property
    def is_done(self) -> bool:
        return len(self.text) >= self.max_tokens


class Batches:
    """vLLM's scheduler does anything it may, and in each step both proposers draft.

    misses_steps: whether requests reach max_model_len, where vLLM does not ask for drafts. No request then begins with
        the text of another one, since in such steps it could not be told from that one.
    """

    def __init__(self, method: str, random: Random, *, misses_steps: bool) -> None:
        self.random, self.misses_steps = random, misses_steps
        self.max_model_len = 24 if misses_steps else 512
        config = vllm_config(num_speculative_tokens=NUMBER, max_model_len=self.max_model_len, max_num_seqs=ROWS)
        self.batch = PersistentBatch(ROWS, self.max_model_len)
        self.bridge = Proposer(config)
        self.told = TokenDrafter(
            {"method": method, "num_speculative_tokens": NUMBER}, _target(config.model_config), max_num_seqs=10_000
        )
        self.known: list[Request] = []
        self.waiting: list[Request] = []
        self.was_called = True  # in the last step

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for event in (self.ask, self.ask, self.ask_on, self.abort, self.preempt):
                if self.random.random() < 0.3:
                    event()
            self.admit()
            self.batch.condense()
            if len(self.batch.ids) > 1 and self.random.random() < 0.5:
                self.batch.swap(*self.random.sample(range(len(self.batch.ids)), 2))
            self.step()

    def ask(self) -> None:
        own = [20 + len(self.known) % 50] if self.misses_steps else []
        self.new([*own, *self.random.choice(PROMPTS)])

    def ask_on(self) -> None:
        """Begin with all of an earlier text, as the next turn of a chat, perhaps after an abort of the earlier one."""
        if self.known and not self.misses_steps:
            earlier = self.random.choice(self.known[-8:])
            earlier.max_tokens = self.random.choice([0, earlier.max_tokens])
            self.new([*earlier.text, self.random.randint(10, 12)])

    def new(self, prompt: Sequence[int]) -> None:
        if len(self.waiting) < ROWS and len(prompt) < self.max_model_len // 2:
            num_chunks, most = self.random.choice([0, 0, 1, 2]), len(prompt) + self.random.randint(1, 25)
            request = Request(len(self.known), [*prompt], min(most, self.max_model_len), num_chunks=num_chunks)
            self.known.append(request)
            self.waiting.append(request)

    def abort(self) -> None:
        if self.known:
            self.random.choice(self.known[-8:]).max_tokens = 0

    def preempt(self) -> None:
        request = self.random.choice([self.known[one] for one in self.batch.ids] or [None])
        # Of one that got tokens in a step without a call, or begins such steps when it comes back, the bridge does not
        # know that they were missed.
        is_known = self.was_called and len(request.text if request else []) + 2 * NUMBER <= self.max_model_len
        if request is not None and not request.is_done and is_known:
            self.batch.remove(request.id)
            self.batch.condense()
            request.num_chunks, request.drafted = self.random.choice([0, 1, 2]), []
            self.waiting.append(request)

    def admit(self) -> None:
        for one in [self.known[one] for one in self.batch.ids]:
            if one.is_done:
                self.end(one)
        self.waiting = [request for request in self.waiting if not request.is_done]
        for request in self.random.sample(self.waiting, len(self.waiting)):
            if sum(one is not None for one in self.batch.ids) < ROWS and self.random.random() < 0.7:
                self.waiting.remove(request)
                self.batch.add(request.id, request.text)

    def end(self, request: Request) -> None:
        self.batch.remove(request.id)
        if request.seen is not None:
            self.told.finish(request.seen, "stop")

    def step(self) -> None:
        running = [self.known[one] for one in self.batch.ids]
        longest = max((len(one.text) + len(one.drafted) for one in running), default=0)
        sampled = [self.sample(row, request) for row, request in enumerate(running)]
        self.was_called = longest + NUMBER <= self.max_model_len
        if running and self.was_called:
            drafts = self.bridge.propose(sampled, self.batch.num_tokens, self.batch.token_ids, slot_mappings=None)
            self.compare(running, sampled, drafts)

    def sample(self, row: int, request: Request) -> list[int]:
        if request.num_chunks:
            request.num_chunks -= 1
            return []
        new: list[int] = []
        for drafted in [*request.drafted, NOISE]:
            if len(request.text) + len(new) < self.max_model_len:
                new.append(next_token(request.text + new))
                if new[-1] != drafted:
                    break
        self.batch.append(row, new, request.drafted[: self.max_model_len - len(request.text)])
        request.text += new
        request.drafted = []
        return new

    def compare(self, running: list[Request], sampled: list[list[int]], drafts: list[list[int]]) -> None:
        asked = []
        for request, new in zip(running, sampled, strict=True):
            if new:
                if request.seen is None:
                    if self.misses_steps:  # what was sampled in a step that was missed is taken for the prompt
                        request.num_prompt_tokens = len(request.text) - len(new)
                    request.seen = TokenRequest(str(request.id), request.text[: request.num_prompt_tokens])
                    self.told.start(request.seen)
                request.seen.append(request.text[len(request.seen.token_ids) :])
                asked.append(request)
        limits = [min(NUMBER, self.max_model_len - 1 - len(request.text)) for request in asked]
        chains = dict(zip(asked, self.told.propose_chains([r.seen for r in asked], np.maximum(limits, 0)), strict=True))
        assert drafts == [chains.get(request, []) for request in running]
        for request, draft in zip(running, drafts, strict=True):
            request.drafted = draft
        for row, request in enumerate(running):
            if request in chains:
                assert self.bridge._rows._of_rows[row].num_prompt_tokens == request.num_prompt_tokens


@pytest.mark.parametrize("misses_steps", [False, True])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_are_those_of_a_proposer_that_is_told_ids(method, misses_steps, monkeypatch):
    monkeypatch.setenv("SPECDEC_VLLM_PROPOSER", method)

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(st.randoms(use_true_random=True))
    def run(random):
        Batches(method, random, misses_steps=misses_steps).run(60)

    run()
