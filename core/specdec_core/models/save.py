"""Saves a trained draft head in the layout in which heads are published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specdec_core.contracts.training import TrainingTarget

WEIGHTS = "model.safetensors"


def save_head(
    folder: Path, target: TrainingTarget, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write config.json and a file of tensors. Floating-point tensors are converted to the target's dtype."""
    dtype = getattr(target.config, "dtype", None) or torch.float32
    text = json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    kept = {name: t.detach().to("cpu", dtype if t.is_floating_point() else t.dtype) for name, t in tensors.items()}
    save_file({name: t.contiguous() for name, t in kept.items()}, folder / WEIGHTS, metadata={"format": "pt"})
