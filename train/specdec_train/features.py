"""What the frozen target computes for a batch of texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from specdec_core import TrainingTarget

NUM_SAMPLED = 64


@torch.no_grad()
def features_of(target: TrainingTarget, token_ids: torch.Tensor, taps: Sequence[str]) -> dict[str, torch.Tensor]:
    """{tap: [batch, length, width]} for int64 token_ids [batch, length], padded at the ends: what is padded is seen by
    nothing before it."""
    model: Any = target.model.base_model
    left: list[torch.Tensor] = []  # by the last layer: the last of transformers' hidden states is normed
    handle = _last_layer(model, target.info.num_layers).register_forward_hook(
        lambda module, args, out: left.append(out[0] if isinstance(out, tuple) else out)
    )
    try:
        output = model(token_ids, use_cache=False, output_hidden_states=any(tap != "final" for tap in taps))
    finally:
        handle.remove()
    before = [*(output.hidden_states or ())[: target.info.num_layers], *left]
    return {tap: output.last_hidden_state if tap == "final" else before[int(tap.partition(".")[2])] for tap in taps}


def _last_layer(model: nn.Module, num_layers: int) -> nn.Module:
    return next(each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == num_layers)[-1]


def weights_fingerprint(target: TrainingTarget) -> str:
    """Of some numbers of each tensor: weights that were trained further under the same name have another one."""
    digest = hashlib.sha256()
    for name, tensor in target.model.state_dict().items():
        sample = tensor.flatten()[:: max(1, tensor.numel() // NUM_SAMPLED)]
        digest.update(f"{name} {list(tensor.shape)} {sample.double().tolist()}".encode())
    return digest.hexdigest()
