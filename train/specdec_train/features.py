"""What the frozen target computes for a batch of texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from specdec_core import TrainingTarget

NUM_SAMPLED = 64


@torch.no_grad()
def features_of(target: TrainingTarget, token_ids: torch.Tensor, taps: Sequence[str]) -> dict[str, torch.Tensor]:
    """{tap: [batch, length, width]} for int64 token_ids [batch, length], padded at the ends: what is padded is seen by
    nothing before it."""
    model: Any = target.model.base_model
    output = model(token_ids, use_cache=False, output_hidden_states=any(tap != "final" for tap in taps))
    found = {"final": output.last_hidden_state}
    return {tap: found[tap] if tap in found else output.hidden_states[int(tap.partition(".")[2])] for tap in taps}


def weights_fingerprint(target: TrainingTarget) -> str:
    """Of some numbers of each tensor: weights that were trained further under the same name have another one."""
    digest = hashlib.sha256()
    for name, tensor in target.model.state_dict().items():
        sample = tensor.flatten()[:: max(1, tensor.numel() // NUM_SAMPLED)]
        digest.update(f"{name} {list(tensor.shape)} {sample.double().tolist()}".encode())
    return digest.hexdigest()
