"""Drafting with an MLP speculator: chains, fixed trees, and trees of the most probable paths."""

from __future__ import annotations

import torch

from specdec_core import BuildContext, Draft, LastHiddenProposer, Level, ProposerBatch, TreeGrower, grow
from specdec_proposer_mlp.candidates import CandidateTree
from specdec_proposer_mlp.config import MLPSpeculatorConfig
from specdec_proposer_mlp.head_config import SpeculatorConfig
from specdec_proposer_mlp.module import Speculator


class MLPSpeculatorProposer(LastHiddenProposer):
    """Drafts with an MLP speculator. Head i drafts the tokens at depth i + 1, each from the state that its parent's
    draft left."""

    def __init__(
        self, config: MLPSpeculatorConfig, context: BuildContext, module: Speculator, head: SpeculatorConfig
    ) -> None:
        super().__init__(config, context, config.shape(context.num_speculative_tokens))
        self._module, self._num_candidates = module, config.n_candidates
        self._top_k = config.top_k_tokens_per_head or head.top_k_tokens_per_head
        context.speed_up(module)
        self._next_state = context.graphed(self._run)

    def grower(self, batch: ProposerBatch) -> TreeGrower:
        if self._num_candidates is None:
            return super().grower(batch)
        return CandidateTree(batch, self._top_k, self._num_candidates)

    def propose(self, batch: ProposerBatch) -> Draft:
        grower = self.grower(batch)
        (state,) = self._next_state(self.hidden(batch), batch.root_token_ids, i=0)

        def forward(level: Level) -> torch.Tensor:
            nonlocal state
            (state,) = self._next_state(state.index_select(0, level.rows), level.token_ids, i=level.depth)
            return self._module.logits(level.depth, state)

        return grow(grower, self._module.logits(0, state), forward)

    def _run(self, state: torch.Tensor, token_ids: torch.Tensor, *, i: int) -> tuple[torch.Tensor]:
        """The state that head i leaves. The first one reads the target's hidden states."""
        state = state if i else self._module.first_state(state)
        return (self._module.next_state(i, state, token_ids),)
