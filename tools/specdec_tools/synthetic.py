"""The proposer `synthetic` of `spec-decode bench`: acceptance at given rates, from drafts that cost little.

It knows the output of plain decoding, which the bench has recorded, and drafts as many of its next tokens as are to
be accepted, then a wrong one. The engine's loop is the usual one: the target's forward pass covers all draft tokens,
and the verifier, which does not know of the rates, accepts what plain decoding generates. So the difference to a real
method with the same rates is the cost of that method's drafting, and what is lost against the best possible speed-up
is the engine's. The output is that of plain decoding.

It is no plugin: only the bench offers it, so no server or `LLM` can select it by mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from attrs import frozen

from specdec_core import BuildContext, Draft, Plan, Proposer, ProposerBatch, ProposerSpec
from specdec_core.config.fields import must, option

if TYPE_CHECKING:
    from specdec_core.contracts.proposer import RequestView

METHOD = "synthetic"
SEED = 0


class KnownOutputs(dict[tuple[int, ...], Sequence[int]]):
    """The output of plain decoding after each prompt, both as token ids."""

    def remember(self, prompts: Iterable[Sequence[int]], outputs: Iterable[Sequence[int]]) -> None:
        """Record what plain decoding generates after each prompt, for drafts of later runs."""
        self.update((tuple(prompt), output) for prompt, output in zip(prompts, outputs, strict=True))


def _are_rates(rates: Sequence[float]) -> bool:
    return len(rates) > 0 and all(0 <= rate <= 1 for rate in rates) and list(rates) == sorted(rates, reverse=True)


@frozen
class SyntheticConfig:
    """Options of the proposer `synthetic`."""

    synthetic_acceptance_rates: Sequence[float] = option(
        must(
            _are_rates,
            "must be numbers from 0 to 1 of which none is above the one before it: entry i is the share of all drafts "
            "whose first i + 1 tokens are accepted",
            "a list of numbers from 0 to 1 that do not rise",
        ),
        "For each position, the share of all drafts whose tokens up to there are accepted.",
    )


def num_right(rates: Sequence[float], uniform: float) -> int:
    """How many tokens of a draft are to be accepted, so that over uniform numbers in [0, 1) the share of drafts with at
    least i + 1 of them is rates[i]."""
    return sum(uniform < rate for rate in rates)


@frozen
class _Known:
    """The known output of a request, and the random numbers that decide how much of it each draft gets right."""

    tokens: Sequence[int]
    random: Random


class Synthetic(Proposer):
    def __init__(self, outputs: KnownOutputs, config: SyntheticConfig, context: BuildContext) -> None:
        self._outputs = outputs
        self._rates, self._vocab_size = config.synthetic_acceptance_rates, context.target.vocab_size
        self._device = context.device
        self._known: dict[str, _Known] = {}
        self._seeds = Random(SEED)

    def start(self, request: RequestView) -> None:
        prompt = tuple(request.token_ids[: request.num_prompt_tokens].tolist())
        self._known[request.id] = _Known(self._outputs.get(prompt, ()), Random(self._seeds.getrandbits(63)))

    def finish(self, request: RequestView, reason: str) -> None:
        self._known.pop(request.id, None)

    def propose(self, batch: ProposerBatch) -> Draft:
        pairs = zip(batch.requests, batch.max_draft_tokens, strict=True)
        return Draft.from_chains([self._chain(request, most) for request, most in pairs], self._device)

    def _chain(self, request: RequestView, most: int) -> list[int]:
        """Return the next tokens of the known output, with wrong ones from where the draft is to be rejected. Beyond
        the known output, and for an unknown prompt, nothing is drafted."""
        known = self._known[request.id]
        num_given = len(request.token_ids) - request.num_prompt_tokens
        tokens = list(known.tokens[num_given : num_given + min(most, len(self._rates))])
        for index in range(num_right(self._rates, known.random.random()), len(tokens)):
            tokens[index] = (tokens[index] + 1) % self._vocab_size
        return tokens


def spec(outputs: KnownOutputs) -> ProposerSpec:
    """The proposer that drafts from these outputs. What is added to them later is used, too."""

    def plan(*_: object) -> Plan:
        return Plan(observes=False)

    return ProposerSpec(METHOD, SyntheticConfig, build=partial(Synthetic, outputs), api=1, plan=plan)
