"""What turns gradients into new weights: AdamW, and for the matrices of layers Muon (Jordan et al. 2024)."""

from __future__ import annotations

import torch

from specdec_train.settings import Settings

BETAS = (0.9, 0.95)
BY_TOKEN = ("embed_tokens.weight", "lm_head.weight")
"""Matrices with a row for each token, of which a step moves few: no matter for Muon."""


def optimizers(trainee: torch.nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """Each parameter is in one of them. Their steps are of like size, so one learning rate serves all."""
    trained = {name: parameter for name, parameter in trainee.named_parameters() if parameter.requires_grad}
    by_muon = [
        parameter
        for name, parameter in trained.items()
        if settings.optimizer == "muon" and parameter.dim() == 2 and not name.endswith(BY_TOKEN)
    ]
    rest = [parameter for parameter in trained.values() if not any(parameter is each for each in by_muon)]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW([g for g in groups if g["params"]], betas=BETAS)]
    if by_muon:
        found.append(torch.optim.Muon(by_muon, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"))
    return found
