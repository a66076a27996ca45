"""An MLP speculator in training: its loss and the checkpoint that it saves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve
from torch import nn

from specdec_core import ConfigError, TrainingBatch, TrainingTarget, save_head, token_loss
from specdec_proposer_mlp.config import MLPSpeculatorConfig
from specdec_proposer_mlp.head_config import SpeculatorConfig
from specdec_proposer_mlp.loading import PREFIX, find, load
from specdec_proposer_mlp.module import Speculator
from specdec_proposer_mlp.recipe import MLPSpeculatorOptions


class SpeculatorTrainee(nn.Module):
    """Trains an MLP speculator on texts, or on what the target generated (Wertheimer et al. 2024, section 4).

    The loss is the sum of the heads' cross entropies: at position t, head i reads the hidden state of token t and the
    tokens t + 1 to t + 1 + i, and predicts token t + 2 + i. With `distill`, the cross entropy is that with the
    target's distribution of the token.
    """

    def __init__(self, options: MLPSpeculatorOptions, target: TrainingTarget) -> None:
        super().__init__()
        self._options, self._target = options, target
        self._config = SpeculatorConfig(
            vocab_size=target.info.vocab_size,
            emb_dim=target.info.hidden_size,
            inner_dim=options.inner_dim or target.info.hidden_size,
            n_predict=options.n_predict,
            top_k_tokens_per_head=(4, 3, *[2] * (options.n_predict - 2))[: options.n_predict],
            tie_weights=options.tie_weights,
            scale_input=options.scale_input,
        )
        self.speculator = Speculator(self._config)
        for weight in self.speculator.parameters():  # as the authors initialize it
            if weight.ndim == 2:
                nn.init.trunc_normal_(weight, 0, self._config.inner_dim**-0.5)
        if options.init_from_target:
            self._init_from_target()

    @torch.no_grad()
    def _init_from_target(self) -> None:
        """Replace embeddings and LM heads by the target's, projected on the directions in which its LM head varies
        most, at the variance of the random weights: similar tokens are close from the beginning."""
        size, model = self._config.inner_dim, self._target.model
        if size > self._config.emb_dim:
            raise ConfigError(
                f"init_from_target projects the target's embedding to inner_dim={size}, which is more than its width "
                f"of {self._config.emb_dim}: give a smaller inner_dim, or leave init_from_target out"
            )
        read, written = (
            part.weight.detach().float() for part in (model.get_input_embeddings(), model.get_output_embeddings())
        )
        directions = torch.linalg.svd(written.T @ written)[0][:, :size]  # [hidden, size]
        for layers, rows in ((self.speculator.emb, read), (self.speculator.head, written)):
            projected = rows @ directions
            projected *= size**-0.5 / projected.std()
            for layer in layers:
                layer.weight.copy_(projected)
        self.speculator.proj[0].weight.copy_(directions.T)

    def forward(self, batch: TrainingBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        state = self.speculator.first_state(batch.features["final"].float())
        total, metrics = state.new_zeros(()), {}
        length, following = batch.token_ids.shape[1], self._following(batch)
        for i in range(min(self._config.n_predict, length - 2)):
            state, logits = self.speculator(i, state[:, : length - 2 - i], batch.token_ids[:, 1 + i : -1])
            loss, metrics[f"accuracy_{i}"] = token_loss(logits, following[:, 1 + i :], batch.counts[:, 2 + i :])
            metrics[f"loss_{i}"] = loss
            total = total + loss
        return total, metrics

    @torch.no_grad()
    def _following(self, batch: TrainingBatch) -> torch.Tensor:
        """What the heads learn about the token after each position but the last: its id, int64 [batch, length - 1], or
        the target's probabilities, float32 [batch, length - 1, vocab]."""
        if not self._options.distill:
            return batch.token_ids[:, 1:]
        return self._target.output_head(batch.features["final"])[:, :-1].softmax(-1, dtype=torch.float32)

    def load(self, model: str) -> Mapping[str, Any]:
        found = find(MLPSpeculatorConfig(model=model), self._target.info, num_speculative_tokens=1)
        self._config = found.head
        self.speculator = load(found, evolve(self._target.info, dtype=torch.float32)).requires_grad_(True)
        names = ("n_predict", "inner_dim", "tie_weights", "scale_input")
        return {name: getattr(found.head, name) for name in names} | {"init_from_target": False}

    def save(self, folder: Path) -> None:
        """Write the speculator as published ones are. Tied tensors are stored once."""
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            **asdict(self._config),
            "n_candidates": 5,
        }
        tensors = {PREFIX + name: tensor for name, tensor in self.speculator.state_dict().items()}
        save_head(folder, self._target, config, tensors)
