"""A test proposer that samples draft tokens from a table of the target's logits, with noise.

It builds its drafts with core's DraftBuilder.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import evolve, field, frozen

from specdec_core import DraftSamplingConfig, Proposer
from specdec_core.config.fields import one_of
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import PLUGIN_API, BuildContext, Plan, ProposerBatch, ProposerSpec
from specdec_core.drafting import DraftBuilder
from specdec_testing.dead_tails import with_dead_tails

TABLE: dict[int, torch.Tensor] = {}
"""n -> the target's logits [vocab ** n, vocab] after each output of n tokens; filled by tests."""


@frozen(kw_only=True)
class TableConfig(DraftSamplingConfig):
    """Options of the proposer.

    quality: which logits to draft from. "good": the target's logits with a little noise; "bad": only noise;
        "adversarial": the negated logits of the target.
    widths: number of children of each node, level by level.
    dead_tails: whether to fill every other draft with dead (padding) nodes up to max_draft_tokens.
    sparse: whether each row of `q` holds the probabilities of a few tokens only, whose ids are in `q_ids`.
    """

    quality: str = field(default="good", validator=one_of("good", "bad", "adversarial"))
    widths: Sequence[int] = (1, 1)
    dead_tails: bool = False
    sparse: bool = False


class TableDraft(Proposer):
    def __init__(self, config: TableConfig, context: BuildContext) -> None:
        self._method, self._widths, self._vocab = config.draft_sample_method, config.widths, context.target.vocab_size
        self._dead_tails, self._sparse = config.dead_tails, config.sparse
        generator = torch.Generator().manual_seed(0)
        noise = {n: torch.randn(table.shape, generator=generator) for n, table in TABLE.items()}
        self._logits = {
            n: {"good": table + noise[n] / 2, "bad": 2 * noise[n], "adversarial": -table}[config.quality]
            for n, table in TABLE.items()
        }

    def propose(self, batch: ProposerBatch) -> Draft:
        outputs = [request.token_ids[request.num_prompt_tokens :] for request in batch.requests]
        lengths = torch.tensor([len(output) for output in outputs])
        codes = torch.tensor([int(np.dot(out, self._vocab ** np.arange(len(out))[::-1])) for out in outputs])
        builder = DraftBuilder(batch, self._method)
        requests, parents = torch.arange(len(outputs)), torch.full((len(outputs),), -1)
        for width in self._widths:
            logits = torch.zeros(len(requests), self._vocab)
            for n, table in self._logits.items():
                logits[lengths == n] = table[codes[lengths == n]]
            grown = builder.grow(logits, requests, parents, width)
            requests, parents = requests[grown.parents], grown.nodes
            lengths = lengths[grown.parents] + 1
            codes = codes[grown.parents] * self._vocab + grown.token_ids
        draft = builder.build()
        if self._sparse and draft.q is not None:
            ids = torch.rand(draft.q.shape, generator=torch.Generator().manual_seed(len(draft.q))).argsort(dim=1)
            draft = evolve(draft, q=draft.q.gather(1, ids), q_ids=ids)
        if not self._dead_tails:
            return draft
        return with_dead_tails(draft, [n * (i % 2) for i, n in enumerate(batch.max_draft_tokens)])


TABLE_DRAFT = ProposerSpec(
    name="table",
    config=TableConfig,
    build=TableDraft,
    api=PLUGIN_API,
    plan=lambda config, target, num_speculative_tokens: Plan(observes=False),
)
