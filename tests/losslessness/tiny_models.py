"""Tiny random models of real architectures.

Their weights are large (`initializer_range`), so that a wrong attention mask or wrong positions change the output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def save_tiny_model(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny random model.

    family: "llama" or "qwen3".
    changes: config values that replace those in SIZES.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class, num_layers = {
        "llama": (LlamaConfig, LlamaForCausalLM, 3),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, 4),
    }[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{"num_hidden_layers": num_layers, **SIZES, **changes}))
    model.to(torch.float32).save_pretrained(folder)
    return folder
