"""Drafting with an MTP module: chains, and trees of fixed shape."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core import BuildContext, FeatureProposer, ProposerBatch, TreeGrower, grower_of
from specdec_proposer_mtp.config import MTPConfig
from specdec_proposer_mtp.loading import Found, load


class MTPProposer(FeatureProposer):
    """Drafts with one MTP module. After the first draft token, its input is its own output."""

    run_is_pure = True

    def __init__(self, config: MTPConfig, context: BuildContext, found: Found) -> None:
        assert context.attention is not None
        target, taps = context.target, (found.family.tap(context.target.num_layers),)
        self._modules = load(found, target, context.attention.implementation)
        super().__init__(context, taps, target.hidden_size, config.draft_window, self._modules[0].embed)
        for module in self._modules:
            context.speed_up(module)
        self._attention.bind([module.attention for module in self._modules])
        self._method = config.draft_sample_method
        self._shape = config.shape(context.num_speculative_tokens)

    def grower(self, batch: ProposerBatch) -> TreeGrower:
        return grower_of(batch, self._shape, self._method)

    def run(
        self, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        drafted: tuple[torch.Tensor, torch.Tensor] = self._modules[0].drafting(embedded, features, positions, rows)
        return drafted

    def logits(self, outputs: torch.Tensor, requests: np.ndarray) -> torch.Tensor:
        return self._context.output_head(outputs)
