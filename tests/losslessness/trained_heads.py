"""Heads for MLP speculators and Medusa, and MTP modules. Most are trained briefly on their target, with their own
plugins' recipes, so that some of their draft tokens are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reference
import torch
from medusa_reference import random_weights
from safetensors.torch import save_file

from specdec_core import Plugins, TargetInfo, TrainingBatch, TrainingTarget

NUM_STEPS, NUM_TEXTS, LENGTH = 60, 24, 24


def trained_head(
    method: str,
    target_dir: Path,
    folder: Path,
    *,
    prepare: Callable[[torch.nn.Module], None] = lambda trainee: None,
    **options: Any,
) -> Path:
    """Train a head on token sequences that the target generated, save it in `folder`, and return the folder.

    prepare: called with the head in training before the first step, to change its weights.
    options: the recipe's own.
    """
    torch.manual_seed(0)
    model = reference.load(target_dir).requires_grad_(False)
    config = model.config
    info = TargetInfo(
        str(target_dir), "llama", config.vocab_size, config.hidden_size, config.num_hidden_layers, 64, torch.float32,
        torch.device("cpu"),
    )  # fmt: skip
    starts = torch.randint(config.vocab_size, (NUM_TEXTS, 2))
    texts = model.generate(
        starts, attention_mask=torch.ones_like(starts), max_new_tokens=LENGTH, do_sample=True, pad_token_id=0
    )
    states = model(texts, output_hidden_states=True).hidden_states[-1]
    recipe = Plugins.load().proposer(method).train
    assert recipe is not None
    target = TrainingTarget(info, config, model, model.get_input_embeddings(), model.get_output_embeddings())
    counts = torch.bincount(texts.flatten(), minlength=config.vocab_size)
    trainee = recipe.make(recipe.options(**options), target, counts)
    prepare(trainee)
    batch = TrainingBatch(texts, torch.ones_like(texts, dtype=torch.bool), {"final": states})
    optimizer = torch.optim.Adam(trainee.parameters(), lr=1e-2)
    for _ in range(NUM_STEPS):
        loss, _ = trainee(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder.mkdir(parents=True)
    trainee.save(folder)
    return folder


def medusa_without_output_layers(folder: Path, num_heads: int, hidden_size: int, vocab_size: int) -> Path:
    """Write random Medusa heads that use the target's output layer, in FasterDecoding's layout. Returns the folder."""
    folder.mkdir(parents=True)
    weights = random_weights(num_heads, 1, hidden_size, vocab_size, torch.Generator().manual_seed(0), own_head=False)
    save_file({name: tensor.float() for name, tensor in weights.items()}, folder / "model.safetensors")
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": 1, "version": "2"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
