"""Write a training checkpoint as a directory that transformers can load."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .model import plain_model
from .tokenizer import fast_tokenizer

WEIGHTS = Path(__file__).parents[1] / "specdec_model_tiny" / "weights"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
"""The weights' files once the model has an MTP module: the second holds the module."""
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", WHOLE)


def export(work: Path, target: Path = WEIGHTS) -> int:
    """Export ``work/checkpoint.pt`` as a transformers checkpoint to the folder ``target``, writing each file
    atomically. Returns the number of tokens that the exported model was trained on."""
    path = work / "checkpoint.pt"
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}; run the training first, or name its work folder")
    state = torch.load(path, weights_only=True)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as folder:
        plain_model(state["masters"]).save_pretrained(folder)
        tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
        fast_tokenizer(tokenizer).save_pretrained(folder)
        settings = Path(folder) / "tokenizer_config.json"
        # The key that transformers 4 also reads, instead of the one that version 5 writes.
        named = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings.write_text(json.dumps(named, indent=2) + "\n")
        for name in FILES:
            (Path(folder) / name).chmod(0o644)
            os.replace(Path(folder) / name, target / name)
    for name in (*SHARDS, INDEX):  # an MTP module belongs to the weights before
        (target / name).unlink(missing_ok=True)
    return int(state["progress"]["tokens"])
