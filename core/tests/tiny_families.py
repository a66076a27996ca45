"""Tiny random models of several transformers families."""

from __future__ import annotations

from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
PARTIAL = {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "first_k_dense_replace": 2,
}


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a tiny random model of a transformers model type. Its biases and norm weights are random too.

    options: fields of the transformers config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **SIZES | options)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


def logits(model: Any, num_tokens: int = 8) -> torch.Tensor:
    """Return the model's logits [num_tokens, vocab] in one forward pass over fixed tokens."""
    with torch.inference_mode():
        return model(7 * torch.arange(num_tokens).unsqueeze(0) % SIZES["vocab_size"], use_cache=False).logits[0]
