"""Recognizes EAGLE heads by their tensors, and lists published heads of well-known targets.

This module runs when plugins are listed, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]

EAGLE = {
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
    """Default layers of the target whose inputs an EAGLE-3 head reads: a low, the middle and a high one."""
    return 2, num_layers // 2, num_layers - 3


def is_eagle3(config: Mapping[str, Any], shapes: Shapes) -> bool:
    """Whether the tensors are an EAGLE-3 head's. Only such a head normalizes the hidden state (`hidden_norm`) beside
    the embedding."""
    return _is_head(shapes) and any(name.endswith(".hidden_norm.weight") for name in shapes)


def is_eagle(config: Mapping[str, Any], shapes: Shapes) -> bool:
    """Whether the tensors are an EAGLE-1 or EAGLE-2 head's. The first layer of such a head has no input norm."""
    return _is_head(shapes) and "layers.0.input_layernorm.weight" not in shapes and not is_eagle3(config, shapes)


def _is_head(shapes: Shapes) -> bool:
    return "fc.weight" in shapes and any(
        name.startswith(("layers.0.self_attn.", "midlayer.self_attn.")) for name in shapes
    )
