"""Tests that the heads which `tiny_heads` writes have the layout of published ones, and that the reference
implementations in `reference_heads` can read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference_heads import reference_eagle, reference_eagle3, target_token_ids
from tiny_heads import (
    BIN,
    SAFETENSORS,
    TinyHead,
    llama3_rope,
    write_eagle,
    write_eagle3,
    write_specforge,
    write_speculators,
)
from tiny_weights import Shape, Target
from torch import Tensor

TARGET = Target(hidden_size=16, vocab_size=50, num_hidden_layers=8)
LAYER = {
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
}
MIDLAYER = {f"midlayer.{name}" for name in {*LAYER, "input_layernorm.weight", "hidden_norm.weight"}}
HEAD3 = {"fc.weight", "norm.weight", "lm_head.weight"}


def logits(head: TinyHead) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    embeddings, output = torch.randn(2, 50, 16, generator=generator).double()
    is_eagle3 = "lm_head.weight" in head.tensors
    features = torch.randn(5, 48 if is_eagle3 else 16, generator=generator)
    reference = reference_eagle3 if is_eagle3 else reference_eagle
    arguments = [1, 2, 3, 4, 5, 6], features, [(7, -1), (8, 0)]
    return reference(head.tensors, head.config, lambda ids: embeddings[ids], lambda x: x @ output.T, *arguments)


@pytest.mark.parametrize("file", [BIN, SAFETENSORS])
@pytest.mark.parametrize("bias", [True, False])
def test_eagle(tmp_path: Path, file: str, bias: bool) -> None:
    head = write_eagle(tmp_path, TARGET, 1, bias=bias, file=file)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", file}
    layer = {f"layers.0.{name}" for name in LAYER}
    assert head.tensors.keys() == {"fc.weight", *layer} | ({"fc.bias"} if bias else set())
    assert head.config.get("bias", True) == bias
    assert logits(head).shape == (3, 50)


def test_eagle_with_more_than_one_layer_embeddings_and_norms(tmp_path: Path) -> None:
    head = write_eagle(tmp_path, TARGET, 1, para_norm=True, shape=Shape(num_hidden_layers=2, own_embeddings=True))
    assert "layers.1.input_layernorm.weight" in head.tensors
    assert "layers.0.input_layernorm.weight" not in head.tensors
    assert head.tensors["embed_tokens.weight"].shape == (50, 16)
    assert logits(head).isfinite().all()


def test_eagle3(tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, TARGET, 2, shape=Shape(draft_vocab_size=20))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", BIN}
    assert head.tensors.keys() == {*MIDLAYER, *HEAD3, "d2t", "t2d"}
    assert head.tensors["midlayer.self_attn.q_proj.weight"].shape == (16, 32)
    assert head.tensors["fc.weight"].shape == (16, 48)
    assert logits(head).shape == (3, 20)
    assert write_eagle3(tmp_path / "same", TARGET).tensors.keys() == {*MIDLAYER, *HEAD3}


def test_specforge(tmp_path: Path) -> None:
    head = write_specforge(tmp_path, TARGET, 2, shape=Shape(rope_scaling=llama3_rope()))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", SAFETENSORS}
    assert head.tensors.keys() == {*MIDLAYER, *HEAD3, "d2t", "t2d"}
    assert head.config["rope_parameters"]["rope_type"] == head.config["rope_scaling"]["rope_type"] == "llama3"
    assert target_token_ids(head.tensors, 50).tolist() == list(range(50))
    assert head.tensors["t2d"].all()


def test_speculators(tmp_path: Path) -> None:
    head = write_speculators(tmp_path, TARGET, 2, shape=Shape(draft_vocab_size=20, num_hidden_layers=2, qk_norm=True))
    assert "layers.0.hidden_norm.weight" in head.tensors
    assert "layers.1.self_attn.q_norm.weight" in head.tensors
    assert head.tensors["layers.1.self_attn.q_proj.weight"].shape == (16, 16)
    assert "model_type" not in head.config
    assert head.config["transformer_layer_config"]["model_type"] == "qwen3"
    assert head.config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert logits(head).shape == (3, 20)


@pytest.mark.parametrize("write", [write_eagle3, write_specforge, write_speculators])
def test_d2t_and_t2d_name_the_same_tokens(tmp_path: Path, write: Callable[..., TinyHead]) -> None:
    tensors = write(tmp_path, TARGET, 3, shape=Shape(draft_vocab_size=20)).tensors
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert target_token_ids(tensors, 20).tolist() == tensors["t2d"].nonzero()[:, 0].tolist() != list(range(20))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(draft_vocab_size=20, rope_scaling=llama3_rope()),
        Shape(norm_before_residual=True, norm_output=True, own_embeddings=True),
        Shape(norm_before_fc=True, attention_bias=True, mlp_bias=True, head_dim=6),
        Shape(fc_norm=True, hidden_size=24),
        Shape(rms_norm_eps=0.01, rope_theta=100.0, dtype=torch.bfloat16),
    ],
)
def test_the_layouts_say_the_same_head(tmp_path: Path, shape: Shape) -> None:
    writers = [write_eagle3, write_specforge, write_speculators]
    ours, *others = [logits(write(tmp_path / write.__name__, TARGET, 4, shape=shape)) for write in writers]
    assert all(other.equal(ours) for other in others)
    assert not logits(write_eagle3(tmp_path / "other", TARGET, 5, shape=shape)).allclose(ours)
