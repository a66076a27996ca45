"""Tiny random models of real architectures, and predictions of which a part is wrong.

The weights are large (`initializer_range`), so that a wrong mask, position or cache entry changes the output.
"""

from __future__ import annotations

import random
from typing import Any

import torch

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
HEADS, WINDOW = {"head_dim": 16}, {"sliding_window": 6}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
} | EXPERTS
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 3, "n_head": 4},  # ALiBi
    "deepseek_v3": LATENT,
    "gemma3_text": HEADS | WINDOW | {"query_pre_attn_scalar": 16},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "gpt_oss": HEADS | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    "llama": {},
    "mistral": HEADS | WINDOW,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi3": WINDOW,
    "qwen3": HEADS,
}


def model_of(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **SIZES | FAMILIES.get(family, {}) | changes)
        return AutoModelForCausalLM.from_config(config).to(torch.float32).eval()


def generated(model: Any, input_ids: torch.Tensor, seed: int = 0, **keywords: Any) -> Any:
    """What `generate` returns, with torch's generator at a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model.generate(input_ids, **keywords)


def partly_wrong(token_ids: list[int], share: float, seed: int = 0) -> list[int]:
    """A prediction of token_ids in which a share of the tokens are others."""
    draw = random.Random(seed)
    return [draw.randrange(60) if draw.random() < share else token for token in token_ids]
