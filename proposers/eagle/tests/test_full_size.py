"""Heads for Llama-3-8B and 3.1-8B, with the tensors of the authors' code (github.com/SafeAILab/EAGLE, cnets1.py and
cnets.py in eagle/model), fit their target. The files are headers of full size without weights."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import SAFETENSORS, write_header

from specdec_core import CompatibilityError, TargetInfo
from specdec_proposer_eagle.config import EagleConfig
from specdec_proposer_eagle.loading import find
from specdec_proposer_eagle.published import is_eagle, is_eagle3

LLAMA = TargetInfo(
    "meta-llama/Llama-3.1-8B-Instruct", "llama", 128256, 4096, 32, 8192, torch.bfloat16, torch.device("cpu")
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
}
MLP = {"mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096), "mlp.down_proj": (4096, 14336)}
TABLES = {"d2t": ("I64", 8), "t2d": ("BOOL", 1)}


def layer(prefix: str, width: int, *norms: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a decoder layer whose attention reads `width` channels."""
    attention = {"q": (4096, width), "k": (1024, width), "v": (1024, width), "o": (4096, 4096)}
    tensors = (
        {f"self_attn.{name}_proj": shape for name, shape in attention.items()} | MLP | dict.fromkeys(norms, (4096,))
    )
    return {f"{prefix}.{name}.weight": shape for name, shape in tensors.items()}


EAGLE = {
    "embed_tokens.weight": (128256, 4096),
    "fc.weight": (4096, 2 * 4096),
    **layer("layers.0", 4096, "post_attention_layernorm"),
}
EAGLE3 = {
    "fc.weight": (4096, 3 * 4096),
    **layer("midlayer", 2 * 4096, "hidden_norm", "input_layernorm", "post_attention_layernorm"),
    "norm.weight": (4096,),
    "lm_head.weight": (32000, 4096),
    "d2t": (32000,),
    "t2d": (128256,),
}
HEADS = {  # config.json, tensors, taps, and the size on the hub in MB
    "eagle": ({**CONFIG, "bias": False}, EAGLE, ("final",), 1550),  # yuhuili/EAGLE-LLaMA3-Instruct-8B
    "eagle3": (  # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
        {**CONFIG, "draft_vocab_size": 32000},
        EAGLE3,
        ("input.2", "input.16", "input.29"),
        850,
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_full_size_fits_its_target(name: str, tmp_path: Path) -> None:
    config, shapes, taps, megabytes = HEADS[name]
    options = EagleConfig(model=write_header(tmp_path, config, shapes, dtypes=TABLES))
    found = find(options, LLAMA, is_eagle3=name == "eagle3")
    assert found.head.taps == taps
    assert found.num_weights == sum(prod(shape) for tensor, shape in shapes.items() if tensor not in TABLES)
    assert (tmp_path / SAFETENSORS).stat().st_size / 1e6 == pytest.approx(megabytes, rel=0.005)
    assert (bool(is_eagle(config, shapes)), bool(is_eagle3(config, shapes))) == (name == "eagle", name == "eagle3")


@pytest.mark.parametrize("name", HEADS)
def test_each_tensor_counts(name: str, tmp_path: Path) -> None:
    config, shapes, *_ = HEADS[name]
    needed = [tensor for tensor in shapes if tensor != "t2d"]
    for i, tensor in enumerate(needed):
        wrong = {**shapes, tensor: (shapes[tensor][0] + 8, *shapes[tensor][1:])}
        options = EagleConfig(model=write_header(tmp_path / str(i), config, wrong, dtypes=TABLES))
        with pytest.raises(CompatibilityError):
            find(options, LLAMA, is_eagle3=name == "eagle3")
