"""A proposer for tests: draws from a table of what the target would say, made worse, by the builder of core."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import field, frozen

from specdec_core import DraftSamplingConfig, Proposer
from specdec_core.drafting import DraftBuilder
from specdec_core.proposer import PLUGIN_API, BuildContext, ProposerSpec
from specdec_core.types import Draft, Plan, ProposerBatch
from specdec_core.validators import one_of

TABLE: dict[int, torch.Tensor] = {}
"""Number of output tokens so far -> logits [vocab ** number, vocab] after each continuation, put here by a test."""


@frozen(kw_only=True)
class TableConfig(DraftSamplingConfig):
    """quality: the table and a little noise, noise alone, or the table's opposite. widths: children per level."""

    quality: str = field(default="good", validator=one_of("good", "bad", "adversarial"))
    widths: Sequence[int] = (1, 1)


class TableDraft(Proposer):
    def __init__(self, config: TableConfig, context: BuildContext) -> None:
        self._method, self._widths, self._vocab = config.draft_sample_method, config.widths, context.target.vocab_size
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
        return builder.build()


TABLE_DRAFT = ProposerSpec(
    name="table",
    config=TableConfig,
    build=TableDraft,
    api=PLUGIN_API,
    plan=lambda config, target, num_speculative_tokens: Plan(observes=False),
)
