"""An MTP module in training: its loss and the checkpoint that it saves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import nn
from transformers import AttentionInterface

from specdec_core import (
    CompatibilityError,
    SlotAttention,
    TrainingBatch,
    TrainingTarget,
    accuracy,
    save_head,
    soft_cross_entropy,
    step_weight,
    unroll,
)
from specdec_proposer_mtp.config import MTPConfig
from specdec_proposer_mtp.loading import family_of, find, layer_config, load, published_names
from specdec_proposer_mtp.module import MTPModule
from specdec_proposer_mtp.recipe import MTPOptions

ATTENTION = "specdec_mtp_training"
"""The name under which transformers' decoder layers find `attend_unrolled`."""


def attend_unrolled(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, scaling: float, **__: Any
) -> tuple[torch.Tensor, None]:
    """Compute attention with the `SlotAttention` that the trainee has set on the layer's attention module."""
    flat = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return module.unrolled.attend(0, *flat, scale=scaling).unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend_unrolled)


class MTPTrainee(nn.Module):
    """Trains an MTP module on its own outputs over several steps, for a target that stays as it is.

    The loss of step k, which drafts the token at depth k, has the weight decay^k; the weights have the sum 1 (FastMTP,
    Cai et al. 2025, section 3.2). FastMTP takes the cross entropy with texts that the target has generated. Here it is
    the cross entropy with the target's distribution, of which such texts are samples. The embedding and the LM head are
    the target's.
    """

    def __init__(self, options: MTPOptions, target: TrainingTarget) -> None:
        super().__init__()
        self._options, self._target, info = options, target, target.info
        self._num_layers = info.num_layers
        self._family = family_of(info.model, info.model_type)
        self._stated = json.loads(target.config.to_json_string(use_diff=False))
        self._stated.pop("quantization_config", None)  # the module's weights are not quantized
        config = layer_config(self._family, self._stated)
        config._attn_implementation = ATTENTION
        self.module = MTPModule(self._family, config)
        for parameter in self.module.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        self._start_from_the_target()

    def _start_from_the_target(self) -> None:
        """Copy the target's final norm, and its embedding where the module has its own."""
        parts = {"norm": self._target.model.base_model.norm, "embed": self._target.model.get_input_embeddings()}
        for name, source in parts.items():
            if (part := getattr(self.module, name)) is not None:
                part.load_state_dict(source.state_dict())

    def forward(self, batch: TrainingBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        final, options = batch.features["final"], self._options
        with torch.no_grad():
            wanted = self._target.output_head(final).float().softmax(-1)
            likeliest = wanted.argmax(-1)
        weights = [options.decay**step for step in range(options.num_steps)]
        total, metrics = final.new_zeros((), dtype=torch.float32), {}
        for step, output in enumerate(self.unrolled(batch)):
            weight, output = step_weight(batch.counts, step), output[:, : -1 - step]
            drafted = self._target.output_head(output.to(final.dtype))
            metrics[f"loss_{step}"] = (soft_cross_entropy(drafted, wanted[:, 1 + step :]) * weight).sum()
            metrics[f"accuracy_{step}"] = accuracy(drafted, likeliest[:, 1 + step :], weight)
            total = total + weights[step] / sum(weights) * metrics[f"loss_{step}"]
        return total, metrics

    def unrolled(self, batch: TrainingBatch) -> Any:
        """Run the module's steps, as `specdec_core.unroll` says."""
        attention: Any = self.module.attention
        attention.unrolled = SlotAttention(*batch.token_ids.shape)
        features = batch.features[self._family.tap(self._target.info.num_layers)].float()
        embed = self._target.embed if self.module.embed is None else self.module.embed
        return unroll(self.module.drafting, embed, batch.token_ids, features, self._options.num_steps)

    def load(self, model: str) -> Mapping[str, Any]:
        found = find(MTPConfig(model=model), self._target.info, num_speculative_tokens=1)
        if found.family.name != self._family.name:
            raise CompatibilityError(
                f"the MTP module in {model!r} is of the family {found.family.name}, and the target's family is "
                f"{self._family.name}: start from one of that"
            )
        if found.num_modules > 1:
            raise CompatibilityError(
                f"{model!r} has {found.num_modules} MTP modules, and training is for one: start from a head with one"
            )
        (self.module,) = load(found, evolve(self._target.info, dtype=torch.float32), ATTENTION)
        self.module.requires_grad_(True)
        self._stated, self._num_layers = found.stated, found.num_layers
        return {}

    def save(self, folder: Path) -> None:
        """Write the module under the family's published names, with the config.json of the target or of the start."""
        number = {self._family.num_modules: 1} if self._family.num_modules else {}
        names = published_names(self._family, self._num_layers)
        tensors = {names(name): tensor for name, tensor in self.module.state_dict().items()}
        stated = {key: value for key, value in self._stated.items() if key != "_name_or_path"}  # a local folder
        save_head(folder, self._target, stated | number, tensors)
