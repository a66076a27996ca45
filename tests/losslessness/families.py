"""One tiny random checkpoint of each family of models, made by transformers from the family's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"head_dim": 16}
WINDOW = {"sliding_window": 5}
UNTIED = {"tie_word_embeddings": False}  # with scaled and tied embeddings a random model repeats its last token
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {  # keys and values of different widths
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
GATED_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SHORT_CONVOLUTION = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
    "attention_multiplier": 0.3,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": HEADS
    | EXPERTS
    | WINDOW
    | {"num_dense_layers": 1, "num_shared_experts": 1, "global_attn_every_n_layers": 3},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": HEADS | WINDOW,
    "deepseek_v2": EXPERTS | LATENT,
    "deepseek_v3": EXPERTS | LATENT,
    "ernie4_5": HEADS,
    "ernie4_5_moe": HEADS
    | EXPERTS
    | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "exaone4": HEADS | WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma": HEADS | UNTIED,
    "gemma2": HEADS | WINDOW | UNTIED | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3_text": HEADS | WINDOW | UNTIED | {"query_pre_attn_scalar": 16},
    "gemma4_text": HEADS
    | WINDOW
    | UNTIED
    | {
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 120,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "glm4": HEADS,
    "glm4_moe": HEADS | EXPERTS,
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
    "gpt_oss": HEADS | EXPERTS | WINDOW,
    "granite": HEADS
    | {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "granitemoe": EXPERTS,
    "granitemoehybrid": EXPERTS | MAMBA,
    "hunyuan_v1_dense": HEADS,
    "lfm2": SHORT_CONVOLUTION,
    "lfm2_moe": EXPERTS | SHORT_CONVOLUTION | {"num_dense_layers": 1},
    "llama": HEADS,
    "llama4_text": HEADS
    | EXPERTS
    | {
        "attention_chunk_size": 160,
        "floor_scale": 160,
        "attn_scale": -4.0,  # past floor_scale, scores change their sign
        "no_rope_layers": [1, 0, 1],
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
    },
    "longcat_flash": EXPERTS
    | LATENT
    | {
        "num_layers": 2,
        "num_hidden_layers": 4,  # each layer attends twice
        "head_dim": 8,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 1,
    },
    "mimo_v2_flash": HEADS | EXPERTS | WINDOW | {"v_head_dim": 12, "swa_num_key_value_heads": 1},
    "minicpm3": LATENT,
    "minimax_m2": HEADS | EXPERTS,
    "mistral": HEADS | WINDOW,
    "mixtral": HEADS | EXPERTS,
    "nemotron": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": WINDOW,
    "phimoe": EXPERTS,
    "qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": EXPERTS,
    "qwen3": HEADS,
    "qwen3_5_moe_text": HEADS | EXPERTS | GATED_DELTA_NET,
    "qwen3_5_text": HEADS | GATED_DELTA_NET,
    "qwen3_moe": HEADS | EXPERTS,
    "qwen3_next": HEADS | EXPERTS | GATED_DELTA_NET,
    "seed_oss": HEADS,
    "smollm3": {},
    "stablelm": {},
    "starcoder2": WINDOW,
}

SPARSE = LATENT | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
DECODER = {
    "is_encoder_decoder": False,
    "d_model": 64,
    "decoder_layers": 3,
    "decoder_ffn_dim": 96,
    "decoder_attention_heads": 4,
}
UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "alibi": ("bloom", {"n_layer": 3, "n_head": 4}, "0 of 3 layers"),
    "alibi that needs a mask": ("mpt", {"d_model": 64, "n_layers": 3, "n_heads": 4}, "trial forward pass"),
    "attention of its own": ("falcon", {}, "falcon"),
    "positions that are counted": ("bart", DECODER, "depends on other tokens"),
    "attention to later tokens": ("bert", {}, "later tokens"),
    "a mask of its own making": ("doge", {}, "mask of its own making"),
    "two attentions in each layer": ("diffllama", HEADS, "several times"),
    "layers that run several times": ("hrm_text", HEADS, "several times"),
    "linear attention": ("olmo_hybrid", GATED_DELTA_NET, "linear_attention"),
    "states and attention in each layer": ("falcon_h1", {}, "hybrid"),
    "states in a family without a row": ("bamba", {"attn_layer_indices": [1]}, "linear_attention"),
    "layers of a single kind": (
        "nemotron_h",
        {"layer_types": ["linear_attention", "full_attention", "mlp"]},
        "nemotron_h",
    ),
    "recurrent layers alone": ("lfm2", {"layer_types": ["conv"] * 3}, "one must attend"),
    "time steps that only prompts limit": (
        "granitemoehybrid",
        EXPERTS | MAMBA | {"time_step_limit": [0.0, 0.2]},
        "one after the other",
    ),
    "sparse attention": ("deepseek_v32", EXPERTS | SPARSE, "layer_types .* of 'deepseek_v32'"),
    "chunks": ("llama4_text", FAMILIES["llama4_text"] | {"attention_chunk_size": 120}, "max_model_len=120 or less"),
    "temperatures": ("llama4_text", FAMILIES["llama4_text"] | {"floor_scale": 100}, "max_model_len=99 or less"),
}
"""Unsupported feature -> (model type that has it, config options, part of the error)."""


RECURRENT = ("granitemoehybrid", "lfm2", "lfm2_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Families in which some layers keep a state instead of keys and values."""


def save_family(name: str, folder: Path, **changes: Any) -> Path:
    """Save a tiny model with random weights, norms and biases included.

    name: the family, a key of FAMILIES or UNSUPPORTED.
    changes: config values that replace those of the family.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options, _ = UNSUPPORTED.get(name, (name, FAMILIES.get(name, {}), ""))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **SIZES | options | changes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float32)
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder
