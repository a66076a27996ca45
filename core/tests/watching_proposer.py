"""A test plugin with the proposer `watching`, which drafts nothing and records the target's hidden states."""

from __future__ import annotations

from attrs import field, frozen

from specdec_core import Draft, Plan, Proposer, ProposerSpec, hookimpl


@frozen
class WatchingConfig:
    taps: list[str]
    seen: list = field(factory=list)  # of the only request: {tap: [num_tokens, width]}


class Watching(Proposer):
    def __init__(self, config, context):
        self.config, self.device = config, context.device

    def observe(self, observation):
        (n,) = observation.host_num_valid
        self.config.seen.append({tap: features[:n].clone() for tap, features in observation.features.items()})

    def propose(self, batch):
        return Draft.from_chains([[] for _ in batch.requests], self.device)


@hookimpl
def specdec_proposers():
    return [
        ProposerSpec(
            name="watching",
            config=WatchingConfig,
            build=Watching,
            api=1,
            plan=lambda config, target, num_speculative_tokens: Plan(taps=tuple(config.taps)),
        )
    ]
