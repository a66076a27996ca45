"""Computes hidden states of the frozen target model for a batch of texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from specdec_core import CompatibilityError, TrainingTarget, register_tap

NUM_SAMPLED = 64


@torch.no_grad()
def features_of(target: TrainingTarget, token_ids: torch.Tensor, taps: Sequence[str]) -> dict[str, torch.Tensor]:
    """Run one forward pass of the target and return the hidden states that `taps` names, {tap: [batch, length, width]}.

    token_ids: int64 [batch, length], padded at the end. The causal mask hides the padding from the texts' tokens.
    taps: names of hidden states: "input.N" (those that enter layer N) or "final" (those after the final norm).
    """
    model: Any = target.model.base_model
    found: dict[str, torch.Tensor] = {}
    of_layers = [tap for tap in taps if tap != "final"]
    layers = _decoder_layers(model, target.info.num_layers) if of_layers else nn.ModuleList()
    with ExitStack() as hooks:
        for tap in of_layers:
            hooks.callback(register_tap(layers, tap, partial(found.__setitem__, tap)).remove)
        output = model(token_ids, use_cache=False)
    found["final"] = output.last_hidden_state
    return {tap: found[tap] for tap in taps}


def _decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise CompatibilityError(
        f"no list of {num_layers} layers was found in {type(model).__name__}, and the draft reads the inputs of some "
        f"layers: train one that reads the final hidden states only"
    )


def weights_fingerprint(target: TrainingTarget) -> str:
    """Return a hash of some values of each weight tensor of the target. It shows whether a target was trained further
    under the same name."""
    digest = hashlib.sha256()
    for name, tensor in target.model.state_dict().items():
        sample = tensor.flatten()[:: max(1, tensor.numel() // NUM_SAMPLED)]
        digest.update(f"{name} {list(tensor.shape)} {sample.double().tolist()}".encode())
    return digest.hexdigest()
