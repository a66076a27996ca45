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
        of_all = context.graphed(module.of_all)
        self._of_all = None if of_all == module.of_all else of_all  # None: there are no graphs

    def propose(self, batch: ProposerBatch) -> Draft:
        grower = self.grower(batch)
        hidden = self.hidden(batch)
        roots = torch.arange(len(hidden), device=hidden.device)  # of each entry of the level, among the rows of hidden
        # All heads run in one CUDA graph. Without graphs, each does when its level is reached: drafts may end before.
        at_once = None if self._of_all is None else self._of_all(hidden, num_heads=self._shape.depth)

        def logits(i: int) -> torch.Tensor:
            return self._logits(i, hidden) if at_once is None else self._output(i, at_once[i])

        def forward(level: Level) -> torch.Tensor:
            nonlocal roots
            roots = roots.index_select(0, level.rows)
            return logits(level.depth).index_select(0, roots)

        return grow(grower, logits(0), forward)

    def _logits(self, i: int, hidden: torch.Tensor) -> torch.Tensor:
        return self._output(i, self._module.hidden(i, hidden))

    def _output(self, i: int, hidden: torch.Tensor) -> torch.Tensor:
        return self._module.logits(i, hidden) if len(self._module.lm_heads) else self._output_head(hidden)
