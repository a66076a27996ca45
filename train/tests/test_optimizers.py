"""Tests which optimizer trains which parameters of a draft model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from specdec_core import ConfigError
from specdec_train.optimizers import optimizers
from specdec_train.settings import Settings


def parameters_of(trainee: nn.Module, optimizer: str) -> dict[str, set[str]]:
    """Return which parameters each optimizer trains, {class name of the optimizer: names of parameters}. optimizer: the
    value of the setting `optimizer`."""
    names = {id(parameter): name for name, parameter in trainee.named_parameters()}
    settings = Settings(target="any", data=(Path("any"),), out=Path("any"), optimizer=optimizer)
    found = optimizers(trainee, settings)
    return {
        type(each).__name__: {names[id(p)] for group in each.param_groups for p in group["params"]} for each in found
    }


def test_muon_has_the_matrices_of_layers():
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config)
    model.transformer.ln_f.requires_grad_(False)
    found = parameters_of(model, "muon")
    layers = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert found["Muon"] == {f"transformer.h.0.{layer}.weight" for layer in layers}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found["AdamW"] == trained - found["Muon"]
    assert {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"} <= found["AdamW"]
    assert parameters_of(model, "adamw") == {"AdamW": trained}


def test_matrices_alone():
    assert parameters_of(nn.Linear(4, 4, bias=False), "muon") == {"Muon": {"weight"}}


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_it_learns(name):
    torch.manual_seed(0)
    layer, wanted = nn.Linear(4, 4), torch.randn(4, 4)
    found = optimizers(layer, Settings(target="any", data=(Path("any"),), out=Path("any"), optimizer=name))
    losses = []
    for _ in range(50):
        loss = (layer(torch.eye(4)) - wanted).square().mean()
        losses.append(loss.item())
        loss.backward()
        for optimizer in found:
            for group in optimizer.param_groups:
                group["lr"] = 0.03
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0] / 2


def test_others_are_refused():
    with pytest.raises(ConfigError, match="optimizer='sgd'"):
        Settings(target="any", data=(Path("any"),), out=Path("any"), optimizer="sgd")
