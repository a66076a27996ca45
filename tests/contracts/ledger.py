"""A test proposer that records its observations and asserts that these cover every request that it drafts for."""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, field, frozen

from specdec_core import BuildContext, Draft, Observation, Plan, Proposer, ProposerBatch, ProposerSpec, RequestView


@frozen(kw_only=True)
class LedgerConfig:
    top_tokens: int = 0
    drafts: bool = True


@define(eq=False)
class Page:
    """What a proposer has observed of one request so far: its tokens and their hidden states."""

    token_ids: list[int] = field(factory=list)
    features: list[torch.Tensor] = field(factory=list)  # [hidden] of each token
    next_token_id: int = -1
    sizes: list[int] = field(factory=list)  # tokens of each observation


class Ledger(Proposer):
    def __init__(self, config: LedgerConfig, context: BuildContext) -> None:
        self.config, self.device = config, context.device
        self.pages: dict[str, Page] = {}
        self.ended: dict[tuple[int, ...], Page] = {}  # by prompt
        self.observations: list[Observation] = []
        self.asked: list[list[str]] = []

    def start(self, request: RequestView) -> None:
        self.pages[request.id] = Page()

    def reset(self, request: RequestView) -> None:
        self.pages[request.id] = Page()

    def finish(self, request: RequestView, reason: str) -> None:
        prompt = tuple(request.token_ids[: request.num_prompt_tokens].tolist())
        self.ended[prompt] = self.pages.pop(request.id)

    def observe(self, observation: Observation) -> None:
        self.observations.append(observation)
        for i, request in enumerate(observation.requests):
            page, num_valid = self.pages[request.id], observation.host_num_valid[i]
            if not num_valid:
                continue
            assert observation.starts[i] == len(page.token_ids), "there is a gap"
            rows = slice(observation.offsets[i], observation.offsets[i] + num_valid)
            positions = observation.positions[rows].tolist()
            assert positions == list(range(observation.starts[i], observation.starts[i] + num_valid))
            page.token_ids += observation.token_ids[rows].tolist()
            page.features += list(observation.features["input.1"][rows].clone())
            page.next_token_id = int(observation.next_token_ids[i])
            page.sizes.append(num_valid)

    def propose(self, batch: ProposerBatch) -> Draft:
        self.asked.append([request.id for request in batch.requests])
        for request in batch.requests:
            page, token_ids = self.pages[request.id], request.token_ids.tolist()
            assert page.token_ids == token_ids[:-1], "it was asked for a draft of what it has not seen"
            assert page.next_token_id == token_ids[-1], "it has not seen the root"
        chains = [[int(request.token_ids[-1])] * min(2, most) for request, most in _pairs(batch)]
        return Draft.from_chains(chains if self.config.drafts else [[]] * len(chains), self.device)


def _pairs(batch: ProposerBatch) -> Any:
    return zip(batch.requests, batch.max_draft_tokens, strict=True)


LEDGER = ProposerSpec(
    name="ledger",
    config=LedgerConfig,
    build=Ledger,
    api=1,
    plan=lambda config, target, n: Plan(taps=("input.1",), top_tokens=config.top_tokens),
)
