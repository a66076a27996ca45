"""Whatever happens to the rows of vLLM's batch, drafts are those of a proposer that is told the requests' ids."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from attrs import define, field
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
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


class Batches(RuleBasedStateMachine):
    """vLLM's scheduler does anything it may, and at each step both proposers draft."""

    requests = Bundle("requests")
    method, max_model_len, misses_steps = "ngram", 512, False

    @initialize()
    def begin(self) -> None:
        config = vllm_config(num_speculative_tokens=NUMBER, max_model_len=self.max_model_len, max_num_seqs=ROWS)
        self.batch = PersistentBatch(ROWS, self.max_model_len)
        self.bridge = Proposer(config)
        self.told = TokenDrafter(
            {"method": self.method, "num_speculative_tokens": NUMBER}, _target(config.model_config), max_num_seqs=10_000
        )
        self.known: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.swaps: list[tuple[int, int]] = []

    @rule(target=requests, prompt=st.sampled_from(PROMPTS), more=st.integers(1, 25), num_chunks=st.integers(0, 2))
    def ask(self, prompt, more, num_chunks):
        return self.new(prompt, more, num_chunks)

    def new(self, prompt: list[int], more: int, num_chunks: int) -> int:
        request = Request(
            len(self.known), [*prompt], min(len(prompt) + more, self.max_model_len), num_chunks=num_chunks
        )
        self.known[request.id] = request
        self.waiting.append(request)
        return request.id

    @rule(target=requests, earlier=requests, word=st.integers(10, 12), ends=st.booleans())
    def ask_on(self, earlier, word, ends):
        """Begin with all of an earlier text, as the next turn of a chat, perhaps after an abort of the earlier one."""
        if self.misses_steps:
            return earlier
        if ends:
            self.known[earlier].max_tokens = 0
        return self.new([*self.known[earlier].text, word], 9, 0)

    @rule(one=requests)
    def abort(self, one):
        self.known[one].max_tokens = 0

    @rule(one=requests, num_chunks=st.integers(0, 2))
    def preempt(self, one, num_chunks):
        request = self.known[one]
        if one in self.batch.ids and not request.is_done:
            self.batch.remove(one)
            request.num_chunks, request.drafted = num_chunks, []
            self.waiting.append(request)

    @rule(first=st.integers(0, ROWS), second=st.integers(0, ROWS))
    def swap(self, first, second):
        self.swaps.append((first, second))

    @rule(num_admitted=st.sampled_from([ROWS, 1, 0]), times=st.integers(1, 6))
    def steps(self, num_admitted, times):
        self.admit(num_admitted)
        for _ in range(times):
            self.step()

    def admit(self, most: int) -> None:
        for one in [self.known[one] for one in self.batch.ids if one is not None]:
            if one.is_done:
                self.end(one)
        self.waiting = [request for request in self.waiting if not request.is_done]
        for request in self.waiting[:most]:
            if sum(one is not None for one in self.batch.ids) < ROWS:
                self.waiting.remove(request)
                self.batch.add(request.id, request.text)

    def end(self, request: Request) -> None:
        self.batch.remove(request.id)
        if request.seen is not None:
            self.told.finish(request.seen, "stop")

    def step(self) -> None:
        self.admit(0)
        self.batch.condense()
        for first, second in self.swaps:
            if max(first, second) < len(self.batch.ids):
                self.batch.swap(first, second)
        self.swaps = []
        running = [self.known[one] for one in self.batch.ids]
        longest = max((len(one.text) + len(one.drafted) for one in running), default=0)
        sampled = [self.sample(row, request) for row, request in enumerate(running)]
        if running and longest + NUMBER <= self.max_model_len:  # else vLLM does not ask
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


def run(machine: type[Batches], max_examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples, stateful_step_count=20, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("method_", ["ngram", "suffix"])
def test_drafts_are_those_of_a_proposer_that_is_told_ids(method_, monkeypatch):
    monkeypatch.setenv("SPECDEC_VLLM_PROPOSER", method_)

    class OfMethod(Batches):
        method = method_

    run(OfMethod, 60)


@pytest.mark.parametrize("method_", ["ngram", "suffix"])
def test_steps_without_a_call_cost_nothing(method_, monkeypatch):
    """vLLM does not ask while a request is near max_model_len. The rows have then grown by more than the new tokens."""
    monkeypatch.setenv("SPECDEC_VLLM_PROPOSER", method_)

    class Short(Batches):
        method, max_model_len, misses_steps = method_, 24, True

    run(Short, 60)
