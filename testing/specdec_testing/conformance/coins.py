"""A plugin of the kit itself: a proposer that samples chains from one random distribution, to have drafts for verifiers
to verify in an engine."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from specdec_core import BuildContext, Draft, DraftBuilder, Plan, Proposer, ProposerBatch, ProposerSpec, hookimpl


class Coins(Proposer):
    def __init__(self, config: Any, context: BuildContext) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self._depth = context.num_speculative_tokens
        self._logits = torch.randn(1, context.target.vocab_size, generator=generator)

    def propose(self, batch: ProposerBatch) -> Draft:
        import torch

        builder = DraftBuilder(batch, "probabilistic")
        requests = torch.arange(len(batch.requests))
        parents = torch.full((len(requests),), -1)
        for _ in range(self._depth):
            grown = builder.grow(self._logits.expand(len(requests), -1), requests, parents)
            requests, parents = requests[grown.parents], grown.nodes
        return builder.build()


@frozen
class NoOptions:
    pass


@hookimpl
def specdec_proposers() -> list[ProposerSpec]:
    plan = Plan(observes=False)
    return [ProposerSpec(name="coins", config=NoOptions, build=Coins, api=1, plan=lambda *given: plan)]
