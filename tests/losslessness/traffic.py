"""Random traffic for an engine: requests that arrive, wait, are cancelled or preempted, and a record of their
results."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import reference
from attrs import define, evolve, field, frozen

from specdec_core import SamplingParams

VOCAB_SIZE = 64
MAX_MODEL_LEN = 64
MOST_PROMPT_TOKENS = 32
BLOCK_SIZE = 4
NUM_SPECULATIVE_TOKENS = 8
MAX_NUM_SEQS = 64


@frozen
class Wish:
    """A request that may be sent many times.

    A run has few distinct requests, so the expected output of each can be computed by running it alone.
    """

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def num_blocks(self) -> int:
        """The number of KV blocks that the request needs to run to its end, draft tokens included."""
        wanted = MAX_MODEL_LEN if self.params.max_tokens is None else len(self.prompt) + self.params.max_tokens
        return -(-min(MAX_MODEL_LEN, wanted + NUM_SPECULATIVE_TOKENS) // BLOCK_SIZE)


@define
class Completion:
    """One of the n completions of a request (SamplingParams.n), still running or ended."""

    wish: Wish
    index: int  # of the n
    cancel_at_step: int | None
    cancel_at_length: int | None  # from inside its own listener
    token_ids: list[int] = field(factory=list)
    finish_reason: str | None = None


@define
class Figures:
    """Counters of one run."""

    num_requests: int = 0
    num_completions: int = 0
    num_steps: int = 0
    num_preempted: int = 0
    num_chunks: int = 0  # prefill chunks that were not the last of their request
    num_cached: int = 0  # tokens whose keys and values were found
    num_cancelled: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    seconds: float = 0.0


def random_wishes(num_wishes: int, seed: int) -> list[Wish]:
    """Make random requests: greedy and sampled, short and long. Some have a limit on draft tokens, several completions
    or stop tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, MOST_PROMPT_TOKENS + 1, size=num_wishes)
    prompts = reference.prompts(VOCAB_SIZE, lengths.tolist(), seed)
    return [Wish(tuple(prompt), _random_params(rng, i)) for i, prompt in enumerate(prompts)]


def _random_params(rng: np.random.Generator, seed: int) -> SamplingParams:
    is_sampled = rng.random() < 0.5
    return SamplingParams(
        n=int(rng.choice([1, 1, 1, 2, 3])) if is_sampled else 1,
        temperature=0.8 if is_sampled else 0.0,
        top_k=int(rng.choice([0, 0, 12])),
        top_p=float(rng.choice([1.0, 1.0, 0.9])),
        seed=seed,
        max_tokens=None if rng.random() < 0.05 else int(rng.integers(1, 33)),
        stop_token_ids=rng.integers(VOCAB_SIZE, size=rng.integers(3)).tolist(),
        num_speculative_tokens=[None, None, None, 0, 1, 3, NUM_SPECULATIVE_TOKENS][int(rng.integers(7))],
    )


def tenth_of_what_they_want(wishes: Sequence[Wish]) -> int:
    """Return a number of KV blocks that is far too small: a tenth of what MAX_NUM_SEQS average requests need at
    once."""
    return MAX_NUM_SEQS * sum(wish.num_blocks for wish in wishes) // len(wishes) // 10


@define
class Traffic:
    """Sends random requests (`wishes`) to an engine, a few before every step, and cancels some."""

    engine: Any
    wishes: Sequence[Wish]
    rng: np.random.Generator
    figures: Figures = field(factory=Figures)
    completions: list[Completion] = field(factory=list)
    _in_flight: dict[str, Completion] = field(factory=dict)

    def run(self, num_requests: int) -> Figures:
        started = perf_counter()
        while self.figures.num_requests < num_requests or self.engine.has_unfinished:
            if len(self._in_flight) < 2 * MAX_NUM_SEQS:
                for _ in range(min(int(self.rng.choice([0, 0, 1, 3, 8])), num_requests - self.figures.num_requests)):
                    self._submit(self.wishes[int(self.rng.integers(len(self.wishes)))])
            for request_id, completion in list(self._in_flight.items()):
                if completion.cancel_at_step == self.figures.num_steps:
                    self.engine.cancel(request_id)
            self._step()
            assert self.figures.num_steps < 100 * num_requests, "the engine makes no progress"
        self.figures.seconds = perf_counter() - started
        self.figures.num_completions = len(self.completions)
        self.figures.num_cancelled = sum(each.finish_reason == "abort" for each in self.completions)
        return self.figures

    def _submit(self, wish: Wish) -> None:
        self.figures.num_requests += 1
        for index in range(wish.params.n):
            fate, steps, length = self.rng.random(), int(self.rng.integers(12)), int(self.rng.integers(1, 12))
            at_step = self.figures.num_steps + steps if fate < 0.06 else None
            completion = Completion(wish, index, at_step, length if fate > 0.96 else None)
            params = wish.params.of_sample(index)
            if not self.engine.num_speculative_tokens:
                params = evolve(params, num_speculative_tokens=None)
            request_id = self.engine.add_request(wish.prompt, params, self._listen)
            self._in_flight[request_id] = completion
            self.completions.append(completion)

    def _listen(self, request: Any, pieces: Any) -> None:
        completion = self._in_flight[request.id]
        completion.token_ids += [piece.token_id for piece in pieces]
        if request.finish_reason is not None:
            del self._in_flight[request.id]
            completion.finish_reason = request.finish_reason
            assert request.output_token_ids == completion.token_ids
        elif completion.cancel_at_length is not None and len(completion.token_ids) >= completion.cancel_at_length:
            self.engine.cancel(request.id)

    def _step(self) -> None:
        report = self.engine.step()
        figures = self.figures
        figures.num_steps += 1
        figures.num_preempted += report.num_preempted
        figures.num_cached += report.num_cached_tokens
        figures.num_draft_tokens += report.num_draft_tokens
        figures.num_accepted += report.num_accepted
        running = self.engine._scheduler.running
        figures.num_chunks += sum(request.num_computed > 0 and request.num_pending > 1 for request in running)
        self.engine.kv.check_integrity()
