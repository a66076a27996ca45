"""Times several engines on the same prompts at the same time."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from attrs import define

from specdec_core import LLM, SamplingParams
from specdec_core.engine.engine import Engine

Name = TypeVar("Name")
NUM_TURNS = 8
"""Of each engine in a batch. More would let all engines meet the same load of the machine even better, but the first
step of a turn, for which nothing is in the processor's caches, would count for more."""


@define
class Timed:
    """What an engine has done so far.

    num_tokens: of output.
    passes: of the target, counted for each request that decoded in it. in_passes: the output tokens of these.
    """

    seconds: float = 0.0
    num_tokens: int = 0
    passes: int = 0
    in_passes: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        return self.in_passes / self.passes

    def step(self, engine: Engine) -> None:
        started = perf_counter()
        report = engine.step()
        self.seconds += perf_counter() - started
        self.num_tokens += report.num_output_tokens
        if not report.num_prefill_tokens:
            self.passes += report.num_decode_requests
            self.in_passes += report.num_output_tokens


@contextmanager
def without_collections() -> Iterator[None]:
    """A garbage collection of all objects would take one engine a quarter of a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@without_collections()
def run_interleaved(
    llms: Mapping[Name, LLM],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    batch_size: int,
    max_tokens: int,
    draws: random.Random,
) -> dict[Name, Timed]:
    """Decode the prompts with each engine, `batch_size` at once, and take turns.

    In each turn every engine runs, in an order that is drawn, until it has emitted another NUM_TURNS-th of its tokens.
    What the proposers have learned of earlier outputs is forgotten first.
    """
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)  # equally many tokens
    found = {name: Timed() for name in llms}
    for llm in llms.values():
        llm.engine.forget()
    for first in range(0, len(prompts), batch_size):
        some = prompts[first : first + batch_size]
        for llm in llms.values():
            for token_ids in some:
                llm.engine.add_request(token_ids, params)
        before = {name: timed.num_tokens for name, timed in found.items()}
        for turn in range(1, NUM_TURNS + 1):
            names = [*llms]
            draws.shuffle(names)
            for name in names:
                engine, wanted = llms[name].engine, before[name] + len(some) * max_tokens * turn // NUM_TURNS
                while engine.has_unfinished and found[name].num_tokens < wanted:
                    found[name].step(engine)
    return found
