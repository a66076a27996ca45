"""Measures, while the engine is built, how long a step takes by its number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch

from specdec_core.budget.cost_curve import sizes_up_to
from specdec_core.config.sampling import SamplingParams
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.kv import KVManager
from specdec_core.engine.request import Request
from specdec_core.engine.runner import Runner
from specdec_core.engine.scheduler import Schedule
from specdec_core.engine.verification import Verification
from specdec_core.engine.warm_up import until_replayed
from specdec_core.errors import CapacityError

CONTEXT = 64
"""Tokens before the root of the requests that are measured."""
NUM_ROUNDS, NUM_TIMED = 2, 2
"""Each size is measured in two rounds, so that one bump of the machine does not slow both."""
LONGEST_S = 1.0
"""No further step is measured after this many seconds, without those in which CUDA graphs are captured. Beyond the
largest one, the curve goes on as a line."""


@torch.inference_mode()
def measure_steps(
    runner: Runner,
    verification: Verification,
    kv: KVManager,
    *,
    max_num_seqs: int,
    num_speculative_tokens: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> dict[int, float]:
    """Return the seconds of a forward pass with verification, by its number of tokens. The largest step has
    max_num_seqs requests with num_speculative_tokens draft tokens each, if these fit. The requests are made for this
    purpose, and leave nothing behind."""
    measured: dict[int, float] = {}
    context = max(1, min(CONTEXT, max_model_len - num_speculative_tokens - 2, max_num_batched_tokens))
    started = perf_counter()
    most = min(max_num_seqs * (1 + num_speculative_tokens), max_num_batched_tokens)
    # First what one request needs: a slow model gets no further.
    sizes = dict.fromkeys([1, min(1 + num_speculative_tokens, most), *sizes_up_to(most)])
    for size in [*sizes] * NUM_ROUNDS:
        if len(measured) > 1 and perf_counter() - started > LONGEST_S:
            break
        chain = min(num_speculative_tokens, size - 1, max(0, max_model_len - context - 1))
        counts = [chain] * (size // (1 + chain))
        if left := size - sum(counts) - len(counts):
            counts.append(left - 1)
        if len(counts) > max_num_seqs or len(counts) * context > max_num_batched_tokens:
            continue
        try:
            with _decoding(runner, verification, kv, context, counts) as decode:
                before = perf_counter()
                until_replayed(runner.graphs, decode)
                started += perf_counter() - before
                seconds = min([decode(0) for _ in range(1 + NUM_TIMED)][1:])
        except CapacityError:
            continue
        measured[size] = min(seconds, measured.get(size, seconds))
    return measured


@contextmanager
def _decoding(
    runner: Runner, verification: Verification, kv: KVManager, context: int, num_draft_tokens: list[int]
) -> Iterator[Callable[[int], float]]:
    """A context with requests that have `context` computed tokens and a root. It gives a function that runs a step of
    them, each with a chain of draft tokens, and returns the seconds. Raises CapacityError if they do not fit in the KV
    cache.

    The function's argument is the first of the token ids. These differ: a mixture of experts would compute equal ones
    with the same experts.
    """
    size = runner.vocab_size
    params = SamplingParams(temperature=0, max_tokens=1)

    def requests_of(first: int) -> list[Request]:
        known = [(np.arange(context + 1) + first + i) % size for i in range(len(num_draft_tokens))]
        return [
            Request(f"measured-{i}", token_ids, params, seed=0, max_total_tokens=context + 2)
            for i, token_ids in enumerate(known)
        ]

    def decode(first: int) -> float:
        decoding = requests_of(first)
        for request in decoding:
            request.num_computed = request.num_prompt_tokens = context
        chains = [[(first + i + j) % size for j in range(number)] for i, number in enumerate(num_draft_tokens)]
        return _step(runner, verification, decoding, 1, chains)

    requests = requests_of(0)
    try:
        for request, number in zip(requests, num_draft_tokens, strict=True):
            kv.admit(request.id, request.token_ids[:0], "", ())
            kv.reserve(request.id, context + 1, number)
        _step(runner, verification, requests, context, [[]] * len(requests))
        yield decode
    finally:
        for request in reversed(requests):  # so that the pool hands out its blocks in order again
            kv.release(request.id)


def _step(
    runner: Runner, verification: Verification, requests: list[Request], num_known: int, chains: list[list[int]]
) -> float:
    schedule = Schedule()
    for request in requests:
        schedule.add(request, num_known)
    draft = Draft.from_chains(chains, runner.device)
    started = perf_counter()
    verification.decide(schedule, draft, runner.run(schedule, draft))
    return perf_counter() - started
