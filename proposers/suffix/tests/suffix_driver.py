"""Test helpers that run a suffix proposer without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field

from specdec_core.api.token_drafter import context_without_target
from specdec_proposer_suffix.config import SuffixConfig
from specdec_proposer_suffix.proposer import SuffixProposer
from specdec_proposer_suffix.store import NUM_STATES
from specdec_testing.drive import MAX_NUM_SEQS, NO_TARGET, batch_of


def texts(number: int, length: int, *, seed: int, num_symbols: int = 50) -> list[list[int]]:
    """Return `number` random token sequences of `length` tokens each. Most tokens are followed by one of three usual
    next tokens, so that strings repeat within and across sequences."""
    random = Random(seed)
    after = [[random.randrange(num_symbols) for _ in range(3)] for _ in range(num_symbols)]
    found = []
    for _ in range(number):
        text = [random.randrange(num_symbols)]
        while len(text) < length:
            again = random.random() < 0.9
            text.append(random.choice(after[text[-1]]) if again else random.randrange(num_symbols))
        found.append(text)
    return found


@define(eq=False)
class Speaker:
    """A request with the interface that proposers get (`RequestView`), to which the test appends tokens."""

    id: str
    tokens: list[int]
    num_prompt_tokens: int = field()
    seed: int = 0

    @num_prompt_tokens.default
    def _all(self) -> int:
        return len(self.tokens)

    @property
    def token_ids(self) -> np.ndarray:
        array = np.array(self.tokens, np.int64)
        array.flags.writeable = False
        return array

    def say(self, *token_ids: int) -> None:
        self.tokens.extend(map(int, token_ids))


class Driver:
    def __init__(self, *, vocab_size: int = 32_000, budget: int = 24, **options: Any) -> None:
        config = SuffixConfig(**{f"suffix_decoding_{name}": value for name, value in options.items()})
        context = context_without_target(evolve(NO_TARGET, vocab_size=vocab_size), budget, MAX_NUM_SEQS, state=None)
        self.proposer = SuffixProposer(config, context)
        self.budget = budget
        self._numbers = count()

    @property
    def num_own_bytes(self) -> int:
        return self.proposer.num_bytes - self.proposer.cache.num_bytes

    @property
    def num_own_states(self) -> int:
        return int(self.proposer._own.book[NUM_STATES])

    def start(self, prompt: Sequence[int]) -> Speaker:
        request = Speaker(f"request-{next(self._numbers)}", list(prompt))
        self.proposer.start(request)
        return request

    def propose_all(self, requests: Sequence[Speaker]) -> list[list[int]]:
        with torch.inference_mode():
            draft = self.proposer.propose(batch_of(requests, [self.budget] * len(requests), temperature=0.0))
        return [draft.tree(i).token_ids for i in range(draft.batch_size)]

    def propose(self, *requests: Speaker) -> list[int]:
        """Draft for all requests in one batch. Returns the token ids of the first request's draft."""
        return self.propose_all(requests)[0]

    def finish(self, request: Speaker) -> None:
        self.proposer.finish(request, "stop")

    def run(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Start a request, append its output and finish it, without drafting for it."""
        request = self.start(prompt)
        request.say(*output)
        self.finish(request)

    def ask(self, context: Sequence[int]) -> list[int]:
        """Return the draft for a new request whose prompt is `context`. The request then finishes without output."""
        request = self.start(context)
        draft = self.propose(request)
        self.finish(request)
        return draft
