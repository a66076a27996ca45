"""Tiny random draft heads for tests, written to a folder in the layouts of the projects that publish heads.

SafeAILab/EAGLE: the config.json of a plain Llama, and pytorch_model.bin; some heads have model.safetensors instead.
SpecForge: the files that transformers' save_pretrained writes.
speculators: a config.json of its own, with the config of the decoder layer inside, and model.safetensors.

Weights are scaled so that the embedding, the hidden state, attention and the MLP all affect the output, and attention
is sharp. So a test of about ten tokens notices a single error (a wrong position, mask or hidden state, or a stale
KV-cache entry): it changes the logits of every output, and the most likely token of about half of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from safetensors.torch import load_file, save_file
from tiny_weights import DEFAULT, Draw, Shape, Target
from torch import Tensor

BIN = "pytorch_model.bin"
SAFETENSORS = "model.safetensors"


@frozen
class TinyHead:
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> TinyHead:
        config = json.loads((folder / "config.json").read_text())
        if (folder / SAFETENSORS).exists():
            return cls(folder, config, load_file(folder / SAFETENSORS))
        return cls(folder, config, torch.load(folder / BIN, weights_only=True))


def llama3_rope(original_max_position_embeddings: int = 16) -> dict[str, Any]:
    """Return a config of Llama 3's rope scaling. The original context length is so short that the scaling changes the
    rotary angles of a tiny head."""
    return {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original_max_position_embeddings,
    }


def write_eagle(
    folder: Path,
    target: Target,
    seed: int = 0,
    *,
    bias: bool = True,
    para_norm: bool = False,
    file: str = BIN,
    shape: Shape = DEFAULT,
) -> TinyHead:
    """Write an EAGLE-1 or -2 head in the layout of SafeAILab/EAGLE. As in published heads, the config has the key
    `bias` only if it is False.

    Args:
        bias: whether fc has a bias.
        para_norm: whether the head has HASS's norms of the embedding and of the hidden state before fc.
        file: BIN or SAFETENSORS.
    """
    draw = Draw(seed, shape, target, hidden_size=target.hidden_size)
    hidden_size = target.hidden_size
    fc = draw.matrix(hidden_size, 2 * hidden_size)
    if not para_norm:
        fc[:, :hidden_size] /= target.embedding_rms
        fc[:, hidden_size:] /= target.feature_rms
    tensors = {"fc.weight": fc, **draw.layers(first_width=hidden_size, strength=1.5)}
    del tensors["layers.0.input_layernorm.weight"]
    if bias:
        tensors["fc.bias"] = draw.vector(hidden_size)
    if para_norm:
        tensors["embedding_layernorm.weight"] = draw.norm(hidden_size)
        tensors["hidden_states_layernorm.weight"] = draw.norm(hidden_size)
    if shape.own_embeddings:
        tensors["embed_tokens.weight"] = draw.embeddings()
    config = {"architectures": ["LlamaForCausalLM"], **draw.config(), **_old_rope(shape)}
    config |= {} if bias else {"bias": False}
    config |= {"add_para_norm": True} if para_norm else {}
    return _write(folder, config, tensors, file, shape.dtype)


def write_eagle3(
    folder: Path,
    target: Target,
    seed: int = 0,
    *,
    file: str = BIN,
    shape: Shape = DEFAULT,
) -> TinyHead:
    """Write an EAGLE-3 head in the layout of SafeAILab/EAGLE: its layer is called midlayer, and it has d2t and t2d only
    if its vocabulary differs from the target's."""
    draw, tensors = _eagle3_tensors(target, seed, shape, first="midlayer")
    config = {"architectures": ["LlamaForCausalLM"], **draw.config(), **_old_rope(shape), **_eagle3_keys(draw)}
    return _write(folder, config, tensors, file, shape.dtype)


def write_specforge(folder: Path, target: Target, seed: int = 0, *, shape: Shape = DEFAULT) -> TinyHead:
    """Write an EAGLE-3 head in the layout of SpecForge: it always has d2t and t2d, and its config has both the new and
    the old keys of the rotary embedding."""
    draw, tensors = _eagle3_tensors(target, seed, shape, first="midlayer")
    tensors.setdefault("d2t", torch.zeros(draw.draft_vocab_size, dtype=torch.int64))
    tensors.setdefault("t2d", torch.ones(target.vocab_size, dtype=torch.bool))
    rope = {**_new_rope(shape), "rope_theta": shape.rope_theta}
    rope |= {"rope_scaling": dict(shape.rope_scaling)} if shape.rope_scaling else {}
    config = {"architectures": ["LlamaForCausalLMEagle3"], **draw.config(), **rope, **_eagle3_keys(draw)}
    return _write(folder, config, tensors, SAFETENSORS, shape.dtype)


def write_speculators(
    folder: Path,
    target: Target,
    seed: int = 0,
    *,
    aux_layer_ids: Sequence[int] | None = None,
    num_speculative_tokens: int = 3,
    shape: Shape = DEFAULT,
) -> TinyHead:
    """Write an EAGLE-3 head in the layout of speculators: the decoder layer's config is nested in the head's, layers
    are called layers.N, and d2t holds the differences between the target's token ids and the head's."""
    draw, tensors = _eagle3_tensors(target, seed, shape, first="layers.0")
    layer = {**draw.config(), **_new_rope(shape), "model_type": "qwen3" if shape.qk_norm else "llama"}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "dtype": str(shape.dtype).removeprefix("torch."),
        "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "draft_vocab_size": draw.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids or target.aux_layer_ids),
        "embed_requires_grad": False,
        "fc_norm": shape.fc_norm,
        "norm_before_fc": shape.norm_before_fc,
        "norm_before_residual": shape.norm_before_residual,
        "norm_output": shape.norm_output,
        "target_hidden_size": target.hidden_size if draw.hidden_size != target.hidden_size else None,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
    }
    return _write(folder, config, tensors, SAFETENSORS, shape.dtype)


def _eagle3_tensors(target: Target, seed: int, shape: Shape, first: str) -> tuple[Draw, dict[str, Tensor]]:
    hidden_size = shape.hidden_size or target.hidden_size
    if hidden_size != target.hidden_size:
        shape = evolve(shape, own_embeddings=True)
    draw = Draw(seed, shape, target, hidden_size)
    fc = draw.matrix(hidden_size, 3 * target.hidden_size)
    normed = shape.norm_before_fc or shape.fc_norm
    layers = draw.layers(first_width=2 * hidden_size, strength=4)
    tensors = {
        "fc.weight": fc if normed else fc / target.feature_rms,
        "layers.0.hidden_norm.weight": draw.norm(hidden_size),
        "norm.weight": draw.norm(hidden_size),
        "lm_head.weight": 3 * draw.matrix(draw.draft_vocab_size, hidden_size),
        **layers,
    }
    if shape.norm_before_fc:
        tensors["input_norm.weight"] = draw.norm(3 * target.hidden_size)
    if shape.fc_norm:
        tensors |= {f"fc_norm.{i}.weight": draw.norm(target.hidden_size) for i in range(3)}
    if shape.own_embeddings:
        tensors["embed_tokens.weight"] = draw.embeddings()
    if draw.draft_vocab_size != target.vocab_size:
        tensors |= draw.vocabulary()
    return draw, {name.replace("layers.0.", f"{first}."): tensor for name, tensor in tensors.items()}


def _eagle3_keys(draw: Draw) -> dict[str, Any]:
    """Return the config keys that EAGLE-3 adds to those of Llama. The key of a variant, such as fc_norm, is present
    only if the head has it."""
    variants = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
    keys: dict[str, Any] = {name: True for name in variants if getattr(draw.shape, name)}
    if draw.hidden_size != draw.target.hidden_size:
        keys["target_hidden_size"] = draw.target.hidden_size
    return {"draft_vocab_size": draw.draft_vocab_size, **keys}


def _old_rope(shape: Shape) -> dict[str, Any]:
    return {"rope_theta": shape.rope_theta, "rope_scaling": dict(shape.rope_scaling) if shape.rope_scaling else None}


def _new_rope(shape: Shape) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta, **(shape.rope_scaling or {})}}


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str, dtype: torch.dtype) -> TinyHead:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if file == SAFETENSORS:
        save_file(tensors, folder / file, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / file)
    return TinyHead.read(folder)
