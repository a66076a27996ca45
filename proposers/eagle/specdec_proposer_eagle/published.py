"""Recognizes EAGLE heads by the names of their tensors, and lists published heads of well-known targets.

The engine imports this module when it lists plugins, so the module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]

# As in the tables of the authors' README (github.com/SafeAILab/EAGLE, commit cb7e084). It has no EAGLE-3 head for
# Llama-3.1-70B, only one for Llama-3.3-70B.
EAGLE = {
    "meta-llama/Llama-3.1-8B-Instruct": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
    "meta-llama/Meta-Llama-3-8B-Instruct": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
    "meta-llama/Meta-Llama-3-70B-Instruct": "yuhuili/EAGLE-LLaMA3-Instruct-70B",
    "meta-llama/Llama-2-7b-chat-hf": "yuhuili/EAGLE-llama2-chat-7B",
    "meta-llama/Llama-2-13b-chat-hf": "yuhuili/EAGLE-llama2-chat-13B",
    "lmsys/vicuna-7b-v1.3": "yuhuili/EAGLE-Vicuna-7B-v1.3",
    "lmsys/vicuna-13b-v1.3": "yuhuili/EAGLE-Vicuna-13B-v1.3",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "yuhuili/EAGLE-mixtral-instruct-8x7B",
}
EAGLE3 = {
    "meta-llama/Llama-3.1-8B-Instruct": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "meta-llama/Llama-3.3-70B-Instruct": "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
    "lmsys/vicuna-13b-v1.3": "yuhuili/EAGLE3-Vicuna1.3-13B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
}


def aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers of the target whose inputs an EAGLE-3 head reads by default: a low, the middle and a high
    layer."""
    return 2, num_layers // 2, num_layers - 3


def is_eagle3(config: Mapping[str, Any], shapes: Shapes) -> str:
    """Return what a checkpoint is if it is an EAGLE-3 head, else "". Only EAGLE-3 has a norm of its own for the hidden
    state, `hidden_norm`, beside that of the embedding.

    shapes: the shape of each of the checkpoint's tensors, by the tensor's name.
    """
    is_it = _is_head(shapes) and any(name.endswith(".hidden_norm.weight") for name in shapes)
    return "an EAGLE-3 head" if is_it else ""


def is_eagle(config: Mapping[str, Any], shapes: Shapes) -> str:
    """Return what a checkpoint is if it is an EAGLE-1 or EAGLE-2 head, else "". The first layer of such a head has no
    input norm.

    shapes: the shape of each of the checkpoint's tensors, by the tensor's name.
    """
    has_norm = "layers.0.input_layernorm.weight" in shapes
    return "an EAGLE head" if _is_head(shapes) and not has_norm and not is_eagle3(config, shapes) else ""


def _is_head(shapes: Shapes) -> bool:
    return "fc.weight" in shapes and any(
        name.startswith(("layers.0.self_attn.", "midlayer.self_attn.")) for name in shapes
    )
