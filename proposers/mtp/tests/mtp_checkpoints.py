"""Tiny checkpoints of the multi-token-prediction (MTP) modules of seven published families, and of this project's own
for Llama: which tensors a module has, under which published names, and random values for them.

  config  = tiny_config(family, **changes)         # Hugging Face field names, flat
  weights = random_weights(family, config, generator)              # exact published keys, float64

Points on which the published implementations differ are options, kept in the config under these keys (defaults in
RULES):
  zero_position_0  True: the embedding of a slot at position 0 is replaced by zeros before its norm
  recur            "post": the hidden state after the module's final norm recurs; "pre": the block's output recurs
  final_norm       "own": the module's own norm before the head; "target": model.norm.weight; "none"
"""

import torch

FAMILIES = (
    "deepseek_v3",
    "glm4_moe",
    "mimo",
    "ernie4_5_moe",
    "qwen3_next",
    "longcat_flash",
    "pangu_ultra_moe",
    "llama",
)

RULES = {
    "deepseek_v3": {"zero_position_0": True, "recur": "post", "final_norm": "own", "hidden_first": False},
    "glm4_moe": {
        "zero_position_0": True,
        "recur": "post",
        "final_norm": "own",
        "hidden_first": False,
    },  # vLLM: recur="pre"
    "mimo": {"zero_position_0": True, "recur": "post", "final_norm": "own", "hidden_first": True},
    "ernie4_5_moe": {
        "zero_position_0": True,
        "recur": "pre",
        "final_norm": "target",
        "hidden_first": False,
    },  # see the facts
    "qwen3_next": {"zero_position_0": False, "recur": "post", "final_norm": "own", "hidden_first": False},
    "longcat_flash": {"zero_position_0": False, "recur": "post", "final_norm": "own", "hidden_first": False},
    "pangu_ultra_moe": {"zero_position_0": True, "recur": "post", "final_norm": "own", "hidden_first": False},
    "llama": {"zero_position_0": False, "recur": "post", "final_norm": "own", "hidden_first": False},
}

_BASE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000.0,
}
_MLA = {
    "q_lora_rank": 10,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "rope_interleave": True,
}
_SIGMOID_MOE = {
    "moe_intermediate_size": 7,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_TINY = {
    "deepseek_v3": {
        **_BASE,
        **_MLA,
        **_SIGMOID_MOE,
        "n_group": 4,
        "topk_group": 2,
        "rms_norm_eps": 1e-6,
        "mla_norm_eps": 1e-6,
    },
    "glm4_moe": {
        **_BASE,
        **_SIGMOID_MOE,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "rms_norm_eps": 1e-5,
        "shared_tensors_in_module": True,
    },
    "mimo": {**_BASE, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-5, "attention_bias": True},
    "ernie4_5_moe": {
        **_BASE,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "use_bias": False,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {
        **_BASE,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 7,
        "shared_expert_intermediate_size": 9,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
    },
    "longcat_flash": {
        **_BASE,
        **_MLA,
        "num_layers": 2,
        "num_hidden_layers": 4,  # each layer attends twice
        "ffn_hidden_size": 24,
        "rms_norm_eps": 1e-5,
        "mla_norm_eps": 1e-6,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "pangu_ultra_moe": {
        **_BASE,
        **_MLA,
        **_SIGMOID_MOE,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "mla_norm_eps": 1e-5,
        "sandwich_norm": True,
        "router_enable_expert_bias": False,
    },
    "llama": {
        **_BASE,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "shared_tensors_in_module": False,
    },
}


def tiny_config(family, **changes):
    return {**_TINY[family], **RULES[family], **changes}


def names(family, config, module=0):
    """Published keys of one module: fusion, block prefix, final norm, embedding, head. `mlp` is the MLP's prefix."""
    target = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "target_norm": "model.norm.weight"}
    if config.get("tie_word_embeddings"):
        target["head"] = target["embed"]
    if family in ("deepseek_v3", "glm4_moe", "pangu_ultra_moe", "llama"):
        p = f"model.layers.{config['num_hidden_layers'] + module}."
        out = {
            "enorm": p + "enorm.weight",
            "hnorm": p + "hnorm.weight",
            "proj": p + "eh_proj.weight",
            "block": p,
            "mlp": p + "mlp.",
            "final": p + "shared_head.norm.weight",
        }
        if config.get("shared_tensors_in_module", True):  # GLM-4.6 and later leave the two copies out
            target.update(embed=p + "embed_tokens.weight", head=p + "shared_head.head.weight")
    elif family == "mimo":
        p = f"model.mtp_layers.{module}."
        out = {
            "enorm": p + "token_layernorm.weight",
            "hnorm": p + "hidden_layernorm.weight",
            "proj": p + "input_proj.weight",
            "block": p,
            "mlp": p + "mlp.",
            "final": p + "final_layernorm.weight",
        }
    elif family == "ernie4_5_moe":
        p = f"model.mtp_block.{module}."
        out = {
            "enorm": f"model.mtp_emb_norm.{module}.weight",
            "hnorm": f"model.mtp_hidden_norm.{module}.weight",
            "proj": f"model.mtp_linear_proj.{module}.weight",
            "block": p,
            "mlp": p + "mlp.",
            "final": None,
        }
    elif family == "qwen3_next":
        p = f"mtp.layers.{module}."
        out = {
            "enorm": "mtp.pre_fc_norm_embedding.weight",
            "hnorm": "mtp.pre_fc_norm_hidden.weight",
            "proj": "mtp.fc.weight",
            "block": p,
            "mlp": p + "mlp.",
            "final": "mtp.norm.weight",
        }
    elif family == "longcat_flash":
        p = f"model.mtp.layers.{module}."
        out = {
            "enorm": p + "enorm.m.weight",
            "hnorm": p + "hnorm.m.weight",
            "proj": p + "eh_proj.weight",
            "block": p,
            "mlp": p + "transformer_layer.mlp.",
            "final": "model.mtp.norm.weight",
        }
        target.update(embed="model.mtp.embed_tokens.weight")
    else:
        raise ValueError(family)
    return {**target, **out}


def is_moe(family):
    return family in ("deepseek_v3", "glm4_moe", "qwen3_next", "pangu_ultra_moe")


def shapes(family, config):
    """{published key: shape} of every MTP tensor and of the target's embedding, head and final norm."""
    c, h = config, config["hidden_size"]
    heads = c["num_attention_heads"]
    out = {"model.embed_tokens.weight": (c["vocab_size"], h), "model.norm.weight": (h,)}
    if not c.get("tie_word_embeddings"):
        out["lm_head.weight"] = (c["vocab_size"], h)

    def mlp(prefix, width):
        out[prefix + "gate_proj.weight"] = out[prefix + "up_proj.weight"] = (width, h)
        out[prefix + "down_proj.weight"] = (h, width)

    for module in range(c["num_nextn_predict_layers"]):
        n = names(family, c, module)
        out.update({n["embed"]: (c["vocab_size"], h), n["head"]: (c["vocab_size"], h), n["proj"]: (h, 2 * h)})
        for key in ("enorm", "hnorm", "final"):
            if n[key]:
                out[n[key]] = (h,)
        b, a = n["block"], n["block"] + "self_attn."
        norm_names = ["input_layernorm", "post_attention_layernorm"]
        if c.get("sandwich_norm"):
            norm_names += ["pre_mlp_layernorm", "post_mlp_layernorm"]
        out.update({b + x + ".weight": (h,) for x in norm_names})
        if "kv_lora_rank" in c:
            nope, rope, v, q_rank, kv_rank = (
                c[x] for x in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")
            )
            out.update(
                {
                    a + "q_a_proj.weight": (q_rank, h),
                    a + "q_a_layernorm.weight": (q_rank,),
                    a + "q_b_proj.weight": (heads * (nope + rope), q_rank),
                    a + "kv_a_proj_with_mqa.weight": (kv_rank + rope, h),
                    a + "kv_a_layernorm.weight": (kv_rank,),
                    a + "kv_b_proj.weight": (heads * (nope + v), kv_rank),
                    a + "o_proj.weight": (h, heads * v),
                }
            )
        else:
            d, kv = c["head_dim"], c["num_key_value_heads"]
            q_rows = heads * d * (2 if family == "qwen3_next" else 1)
            out.update(
                {
                    a + "q_proj.weight": (q_rows, h),
                    a + "k_proj.weight": (kv * d, h),
                    a + "v_proj.weight": (kv * d, h),
                    a + "o_proj.weight": (h, heads * d),
                }
            )
            if c.get("attention_bias"):  # q, k, v only (glm4_moe, mimo)
                out.update({a + "q_proj.bias": (q_rows,), a + "k_proj.bias": (kv * d,), a + "v_proj.bias": (kv * d,)})
            if c.get("use_qk_norm") or family == "qwen3_next":
                out.update({a + "q_norm.weight": (d,), a + "k_norm.weight": (d,)})
        m = n["mlp"]
        if not is_moe(family):
            mlp(m, c["ffn_hidden_size"] if family == "longcat_flash" else c["intermediate_size"])
            continue
        experts = c["num_experts"] if family == "qwen3_next" else c["n_routed_experts"]
        out[m + "gate.weight"] = (experts, h)
        for e in range(experts):
            mlp(f"{m}experts.{e}.", c["moe_intermediate_size"])
        if family == "qwen3_next":
            mlp(m + "shared_expert.", c["shared_expert_intermediate_size"])
            out[m + "shared_expert_gate.weight"] = (1, h)
        else:
            mlp(m + "shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"])
            if family != "pangu_ultra_moe" or c["router_enable_expert_bias"]:
                out[m + "gate.e_score_correction_bias"] = (experts,)
    return out


def random_weights(family, sizes=None, generator=None):
    """Random float64 weights under the published keys; `sizes` is a config or changes to the tiny one.

    A module's copies of the target's embedding and head are equal to the target's, as published."""
    config = tiny_config(family, **(sizes or {}))
    out = {}
    for key, shape in shapes(family, config).items():
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if key.endswith(("norm.weight", "norm.m.weight")) or ("_norm." in key and len(shape) == 1):
            x = 0.3 * x if family == "qwen3_next" else 1.0 + 0.3 * x
        elif len(shape) == 1:
            x = 0.3 * x
        elif "embed_tokens" not in key:
            x = x / shape[1] ** 0.5 * (2.0 if "lm_head" in key or "head.head" in key else 1.0)
        out[key] = x
    for module in range(config["num_nextn_predict_layers"]):
        n = names(family, config, module)
        out[n["embed"]] = out["model.embed_tokens.weight"].clone()
        if "lm_head.weight" in out:
            out[n["head"]] = out["lm_head.weight"].clone()
    return out
