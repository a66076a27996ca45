"""Copies a checkpoint without its MTP modules: vLLM's Llama refuses layers that config.json does not count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from inflate import LAYER, NOT_COPIED
from safetensors.torch import save_file

from specdec_core import Checkpoint

NUM_MODULES = "num_nextn_predict_layers"


def without_mtp(model: Path, folder: Path) -> Path:
    """Return the folder of a copy of the model, with its drafts; the model's own if it has no MTP module.

    folder: where the copy is written; it must not exist.
    """
    checkpoint = Checkpoint(str(model))
    config = checkpoint.config
    if not config.get(NUM_MODULES):
        return model
    shutil.copytree(model, folder, ignore=lambda at, names: _not_copied(names) if Path(at) == model else set())
    kept = [name for name in checkpoint.shapes if _layer(name) < config["num_hidden_layers"]]
    save_file(checkpoint.load(kept), folder / "model.safetensors", metadata={"format": "pt"})
    plain = {key: value for key, value in config.items() if key != NUM_MODULES}
    (folder / "config.json").write_text(json.dumps(plain), encoding="utf-8")
    return folder


def _not_copied(names: list[str]) -> set[str]:
    return {name for name in names if name != "drafts" and any(Path(name).match(pattern) for pattern in NOT_COPIED)}


def _layer(name: str) -> int:
    match = LAYER.fullmatch(name)
    return int(match[2]) if match else -1
