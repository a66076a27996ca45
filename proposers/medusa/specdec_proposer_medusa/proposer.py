"""Drafting with Medusa heads: trees of fixed shape, and chains."""

from __future__ import annotations

import torch

from specdec_core import BuildContext, Draft, LastHiddenProposer, Level, ProposerBatch, TokenTree, grow
from specdec_proposer_medusa.config import MedusaConfig
from specdec_proposer_medusa.module import MedusaHeads


class MedusaProposer(LastHiddenProposer):
    """Drafts with Medusa heads. All draft tokens at depth i + 1 of a request are guesses of head i, whatever token they
    follow."""

    def __init__(
        self,
        config: MedusaConfig,
        context: BuildContext,
        shape: TokenTree,
        module: MedusaHeads,
        to_target: torch.Tensor | None,
    ) -> None:
        super().__init__(config, context, shape, to_target)
        self._module, self._output_head = module, context.output_head
        context.speed_up(module)

    def propose(self, batch: ProposerBatch) -> Draft:
        grower = self.grower(batch)
        hidden = self.hidden(batch)
        roots = torch.arange(len(hidden), device=hidden.device)  # of each entry of the level, among the rows of hidden

        def forward(level: Level) -> torch.Tensor:
            nonlocal roots
            roots = roots.index_select(0, level.rows)
            return self._logits(level.depth, hidden).index_select(0, roots)

        return grow(grower, self._logits(0, hidden), forward)

    def _logits(self, i: int, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self._module.hidden(i, hidden)
        return self._module.logits(i, hidden) if len(self._module.lm_heads) else self._output_head(hidden)
