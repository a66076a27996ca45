"""Tests which optimizer trains which parameters of a draft model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from specdec_core import ConfigError, Plugins, load_training_target
from specdec_train.muon import Muon
from specdec_train.optimizers import optimizers
from specdec_train.settings import Settings


def parameters_of(trainee: nn.Module, optimizer: str) -> dict[str, set[str]]:
    """Return which parameters each optimizer trains, {class name of the optimizer: names of parameters}. optimizer: the
    value of the setting `optimizer`."""
    names = {id(parameter): name for name, parameter in trainee.named_parameters()}
    settings = Settings(target="any", data=(Path("any"),), out=Path("any"), optimizer=optimizer)
    found = optimizers(trainee, settings, torch.float32)
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


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "draft_model"])
def test_muon_has_no_matrix_with_a_row_for_each_token(method):
    recipe = Plugins.load().proposer(method).train
    target = load_training_target("tiny", "float32", "cpu")
    trainee = recipe.make(recipe.options(), target, torch.ones(target.info.vocab_size, dtype=torch.int64))
    sizes = {name: parameter.shape for name, parameter in trainee.named_parameters()}
    found = parameters_of(trainee, "muon")
    assert found["Muon"]
    assert [name for name in found["Muon"] if target.info.vocab_size in sizes[name]] == []
    layers = {name for name, size in sizes.items() if len(size) == 2 and target.info.vocab_size not in size}
    assert layers & found["AdamW"] == set()


def test_matrices_alone():
    assert parameters_of(nn.Linear(4, 4, bias=False), "muon") == {"Muon": {"weight"}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_it_learns(name, dtype):
    torch.manual_seed(0)
    layer, wanted = nn.Linear(4, 4), torch.randn(4, 4)
    found = optimizers(layer, Settings(target="any", data=(Path("any"),), out=Path("any"), optimizer=name), dtype)
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


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_muon_is_torchs(shape):
    """In bfloat16 to the last bit; in float32 with orthogonal updates."""
    ours, torchs, exact = (nn.Parameter(torch.ones(shape)) for _ in range(3))
    kinds = (
        Muon([ours], lr=0.02),
        torch.optim.Muon([torchs], lr=0.02, adjust_lr_fn="match_rms_adamw"),
        Muon([exact], lr=0.02, dtype=torch.float32),
    )
    for seed in range(4):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        before = exact.detach().clone()
        for weight, kind in zip((ours, torchs, exact), kinds, strict=True):
            weight.grad = gradient.clone()
            kind.step()
        assert torch.equal(ours, torchs)
        torch.testing.assert_close(exact, ours, rtol=0, atol=0.02)
        update = (exact - before * (1 - 0.02 * 0.1)) / (0.02 * 0.2 * max(shape) ** 0.5)
        assert torch.linalg.svdvals(update.detach())[:-2].sub(1).abs().max() < 0.4
    kinds[0].load_state_dict(kinds[1].state_dict())  # checkpoints of the one are taken by the other
    assert torch.equal(*(kind.state[w]["momentum_buffer"] for kind, w in zip(kinds, (ours, torchs), strict=False)))


def test_others_are_refused():
    with pytest.raises(ConfigError, match="optimizer='sgd'"):
        Settings(target="any", data=(Path("any"),), out=Path("any"), optimizer="sgd")
