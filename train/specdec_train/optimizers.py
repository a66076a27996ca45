"""Optimizers: AdamW, and Muon (Jordan et al. 2024) for the weight matrices of the draft model's layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specdec_train.muon import Muon
from specdec_train.settings import Settings

BETAS = (0.9, 0.95)
OUTPUTS = {"lm_head", "lm_heads", "head"}
"""Names of output layers over the vocabulary, or of lists of these."""
MUON_SCALE = 10
"""Muon's learning rate relative to AdamW's: about the best for heads of the embedded model."""


def optimizers(trainee: nn.Module, settings: Settings, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Create the optimizers for a draft model in training. Each trainable parameter is in exactly one of them. The
    learning rate of a parameter group is the run's learning rate times the group's `scale`.

    dtype: the target's. Muon orthogonalizes in bfloat16 if the target is computed in it, else in float32.
    """
    by_muon = _matrices_of_layers(trainee) if settings.optimizer == "muon" else {}
    rest = [each for each in trainee.parameters() if each.requires_grad and id(each) not in by_muon]
    decay: dict[str, Any] = {"weight_decay": settings.weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": [each for each in rest if each.dim() > 1], "scale": 1, **decay},
        {"params": [each for each in rest if each.dim() <= 1], "scale": 1, "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = []
    if rest:
        found.append(torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS))
    if by_muon:
        matrices = {"params": list(by_muon.values()), "scale": MUON_SCALE}
        by = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        found.append(Muon([matrices], dtype=by, **decay))
    return found


def _matrices_of_layers(trainee: nn.Module) -> dict[int, nn.Parameter]:
    """Return the matrices that Muon trains, {id(matrix): matrix}. Embeddings and LM heads are left out: their rows
    belong to single tokens, and Muon's authors train them with AdamW."""
    by_token = [
        module
        for name, module in trainee.named_modules()
        if isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and _last_word(name) in OUTPUTS)
    ]
    not_these = {id(parameter) for module in by_token for parameter in module.parameters()}
    trained = (each for each in trainee.parameters() if each.requires_grad and each.dim() == 2)
    return {id(each): each for each in trained if id(each) not in not_these}


def _last_word(name: str) -> str:
    """The last part of a module's name that is no number: "lm_heads" of "heads.lm_heads.0"."""
    return next((part for part in reversed(name.split(".")) if not part.isdigit()), "")
