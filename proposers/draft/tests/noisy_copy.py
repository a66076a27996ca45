"""Draft models for tests: copies of a target with noise on the weights. The target accepts some of their draft tokens
and rejects others."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def noisy_copy(target: Path, folder: Path, noise: float = 0.05, seed: int = 0) -> Path:
    """Save a copy of a target whose weight matrices have Gaussian noise added, and return the copy's folder.

    noise: standard deviation of the noise, relative to the standard deviation of each matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(target / "model.safetensors")
    for weight in weights.values():
        if weight.dim() == 2:
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((target / name).read_bytes())
    return folder
