"""Medusa heads in training: their loss and the checkpoint that they save."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from specdec_core import TrainingBatch, TrainingTarget, most_frequent, save_head, token_loss
from specdec_proposer_medusa.loading import TOKEN_MAP
from specdec_proposer_medusa.module import HeadSizes, MedusaHeads
from specdec_proposer_medusa.recipe import MedusaOptions


class MedusaTrainee(nn.Module):
    """Trains Medusa heads while the target stays as it is (Medusa-1; Cai et al. 2024, section 2.2.1).

    At position t of a text, head i predicts token t + 2 + i. Tokens outside the heads' vocabulary are masked. The loss
    is the weighted sum of the heads' cross entropies.
    """

    token_map: torch.Tensor  # int64 [draft_vocab], ascending
    to_draft: torch.Tensor  # int64 [vocab], indices into token_map; -1: not in the heads' vocabulary

    def __init__(self, options: MedusaOptions, target: TrainingTarget, token_counts: torch.Tensor) -> None:
        super().__init__()
        size, info = options.vocab_size(target.info), target.info
        self._options, self._target = options, target
        self.heads = MedusaHeads(
            HeadSizes(
                num_heads=options.num_heads,
                num_layers=options.num_layers,
                hidden_size=info.hidden_size,
                vocab_size=size,
                num_outputs=options.num_heads,
                has_bias=True,
            )
        )
        ids = most_frequent(token_counts, size)
        to_draft = torch.full((info.vocab_size,), -1)
        to_draft[ids] = torch.arange(size)
        self.register_buffer("token_map", ids)
        self.register_buffer("to_draft", to_draft)
        output = target.model.get_output_embeddings()
        with torch.no_grad():  # at first, every head predicts what the target's LM head does
            for layer in self.heads.lm_heads:
                layer.weight.copy_(output.weight[ids.to(output.weight.device)])
            for layer in (layer for head in self.heads.heads for layer in head):
                layer.weight.zero_()
                layer.bias.zero_()

    def forward(self, batch: TrainingBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        hidden, wanted = batch.features["final"].float(), self.to_draft[batch.token_ids]
        counts = batch.counts & (wanted >= 0)
        total, metrics = hidden.new_zeros(()), {}
        for i in range(min(self._options.num_heads, wanted.shape[1] - 2)):
            logits = self.heads.logits(i, self.heads.hidden(i, hidden[:, : -2 - i]))
            loss, metrics[f"accuracy_{i}"] = token_loss(logits, wanted[:, 2 + i :].clamp(min=0), counts[:, 2 + i :])
            metrics[f"loss_{i}"] = loss
            total = total + self._options.decay**i * loss
        return total, metrics

    def save(self, folder: Path) -> None:
        """Write the heads in vLLM's layout, which has a place for a truncated vocabulary."""
        info, size = self._target.info, len(self.token_map)
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": info.hidden_size,
            "vocab_size": info.vocab_size,
            "num_heads": self._options.num_heads,
            "num_hidden_layers": self._options.num_layers,
            "medusa_fc_bias": True,
            "truncated_vocab_size": size if size < info.vocab_size else None,
        }
        tensors = {f"lm_heads.{i}.weight": layer.weight for i, layer in enumerate(self.heads.lm_heads)}
        for i, head in enumerate(self.heads.heads):
            for j, layer in enumerate(head):
                tensors |= {f"blocks.{i}.layers.{j}.{kind}": getattr(layer, kind) for kind in ("weight", "bias")}
        if size < info.vocab_size:
            tensors[TOKEN_MAP] = self.token_map
        save_head(folder, self._target, config, tensors)
