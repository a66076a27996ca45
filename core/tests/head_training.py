"""What the tests of training recipes of draft heads share: a target, batches, and a short run of specdec-train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from specdec_core import Plugins, TargetInfo, TrainingBatch, TrainingTarget
from specdec_testing import tiny_target
from specdec_train.run import train
from specdec_train.settings import Settings

VOCAB_SIZE, HIDDEN_SIZE, BATCH, LENGTH = 48, 32, 3, 9


def training_target(folder: Path) -> TrainingTarget:
    """Save a tiny target in `folder`, and load it as specdec-train does."""
    tiny_target(folder, initializer_range=0.5, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    info = TargetInfo(str(folder), "llama", VOCAB_SIZE, HIDDEN_SIZE, 1, 512, torch.float32, torch.device("cpu"))
    return TrainingTarget(info, model.config, model, model.get_input_embeddings(), model.get_output_embeddings())


def random_batch(target: TrainingTarget, seed: int = 1) -> TrainingBatch:
    """Draw a batch of texts. A third of the tokens do not count."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(VOCAB_SIZE, (BATCH, LENGTH), generator=generator)
    counts = torch.rand(BATCH, LENGTH, generator=generator) > 1 / 3
    return TrainingBatch(token_ids, counts, {"final": final_hidden_states(target, token_ids)})


@torch.no_grad()
def final_hidden_states(target: TrainingTarget, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the target's hidden states after its final norm, [batch, length, hidden]."""
    states: torch.Tensor = target.model(token_ids, output_hidden_states=True).hidden_states[-1]
    return states


def losses_of(trainee: torch.nn.Module, batch: TrainingBatch, num_steps: int) -> list[float]:
    """Train on the same batch with Adam and return the loss before each step."""
    optimizer, losses = torch.optim.Adam(trainee.parameters(), lr=1e-2), []
    for _ in range(num_steps):
        loss, _ = trainee(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(method: str, target: TrainingTarget, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Train a draft head with specdec-train on texts that the target generated, and save it in folder / "out". Returns
    the evaluations before and after. options: the recipe's own."""
    torch.manual_seed(0)
    starts = torch.randint(VOCAB_SIZE, (400, 1))
    texts = target.model.generate(
        starts, attention_mask=torch.ones_like(starts), max_new_tokens=30, do_sample=True, pad_token_id=0
    )
    np.save(folder / "texts.npy", texts.numpy())
    settings = Settings(
        target=target.info.model,
        data=(folder / "texts.npy",),
        out=folder / "out",
        dtype="float32",
        length=32,
        steps=100,
        lr=1e-2,
        evaluate_every=0,
        eval_prompts=6,
        eval_tokens=24,
    )
    spec = Plugins.load().proposer(method)
    assert spec.train is not None
    train(spec, settings, spec.train.options(**options))
    lines = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "held_out_loss" in line]
