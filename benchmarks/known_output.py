"""A proposer for benchmarks that drafts outputs which are known in advance, with wrong tokens at a chosen rate."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
from attrs import frozen

from specdec_core import BuildContext, Draft, DraftTree, Plan, Proposer, ProposerBatch, ProposerSpec, hookimpl

OUTPUTS: dict[tuple[int, ...], list[int]] = {}
"""The known output of each prompt, both as token ids."""


@frozen
class KnownOutputConfig:
    """Options of the proposer `known_output`.

    known_branches: number of random siblings before each token of the known output in a draft tree. With 0, drafts
        are chains.
    known_right: probability that a token of the known output is drafted unchanged. Otherwise a random token replaces
        it.
    """

    known_branches: int = 0
    known_right: float = 0.8


class KnownOutput(Proposer):
    def __init__(self, config: KnownOutputConfig, context: BuildContext) -> None:
        self._config, self._device, self._vocab_size = config, context.device, context.target.vocab_size

    def propose(self, batch: ProposerBatch) -> Draft:
        trees = [self._tree(r, most) for r, most in zip(batch.requests, batch.max_draft_tokens, strict=True)]
        return Draft.from_trees(trees, self._device)

    def _tree(self, request: object, max_nodes: int) -> DraftTree:
        tokens = request.token_ids.tolist()
        prompt, given = tokens[: request.num_prompt_tokens], len(tokens) - request.num_prompt_tokens
        rng = np.random.default_rng([crc32(request.id.encode()), len(tokens)])
        token_ids: list[int] = []
        parents: list[int] = []
        above = -1
        for right in OUTPUTS[tuple(prompt)][given:]:
            if len(token_ids) + self._config.known_branches + 1 > max_nodes:
                break
            wrong = rng.integers(self._vocab_size, size=self._config.known_branches).tolist()
            token_ids += [*wrong, right if rng.random() < self._config.known_right else int(rng.integers(100))]
            parents += [above] * (len(wrong) + 1)
            above = len(token_ids) - 1
        return DraftTree(token_ids, parents)


@hookimpl
def specdec_proposers() -> Sequence[ProposerSpec]:
    def plan(*_: object) -> Plan:
        return Plan(observes=False)

    return [ProposerSpec(name="known_output", config=KnownOutputConfig, build=KnownOutput, api=1, plan=plan)]
