"""Float64 reference of the multi-token-prediction (MTP) modules of seven published families, and of this project's own
for Llama, which has DeepSeek's names and fusion around a Llama layer.

Plain torch, written from the facts in mtp_facts.md; no engine or transformers code is used. No KV cache: every call
recomputes the whole sequence.

Slot convention (vLLM, SGLang): slot i holds the target's feature of token i, the embedding of token i+1, and the
position of token i. Its logits are about token i+2. With T features there are T+1 tokens: the last one is the token
the target has just chosen. (transformers counts the positions one higher; rotary attention only sees differences.)

  config  = tiny_config(family, **changes)         # Hugging Face field names, flat
  weights = random_weights(family, config, generator)              # exact published keys, float64
  hidden, logits = forward(family, config, weights, embeddings_of_next_tokens, features, positions, module=0)
  drafts, logits = chain(family, config, weights, tokens, features, positions, k, mode="repeat" | "modules")

`hidden` is what recurs: the value to be used as `features` of the next step. Points on which the published
implementations differ are options, kept in the config under these keys (defaults in RULES):
  zero_position_0  True: the embedding of a slot at position 0 is replaced by zeros before its norm
  recur            "post": the hidden state after the module's final norm recurs; "pre": the block's output recurs
  final_norm       "own": the module's own norm before the head; "target": model.norm.weight; "none"
The key draft_window, an option of the engine, limits attention to that many slots: a slot's own and those before it.
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


def _is_moe(family):
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
        if not _is_moe(family):
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


def rms_norm(x, weight, eps, zero_centred=False):
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x * (1.0 + weight if zero_centred else weight)


def rotate(x, positions, theta, dim, interleaved):
    """Rotary embedding of the first `dim` channels of x [T, heads, d]; channel pairs (2j, 2j+1) or (j, j+dim/2)."""
    freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = positions.to(torch.float64)[:, None, None] * freq
    cos, sin = angle.cos(), angle.sin()
    first = slice(0, dim, 2) if interleaved else slice(0, dim // 2)
    second = slice(1, dim, 2) if interleaved else slice(dim // 2, dim)
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def attend(q, k, v, scale, window=None):
    """Causal attention; q [T, heads, d], k and v [T, kv_heads, d]; head j reads kv head j // (heads // kv_heads)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    t = q.shape[0]
    hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
    if window:
        hidden |= torch.ones(t, t, dtype=torch.bool).tril(-window)
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(t, -1)


def attention_mla(x, w, p, c, positions):
    t, heads = x.shape[0], c["num_attention_heads"]
    nope, rope, v_dim, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
    q_latent = rms_norm(x @ w[p + "q_a_proj.weight"].T, w[p + "q_a_layernorm.weight"], c["mla_norm_eps"])
    kv = x @ w[p + "kv_a_proj_with_mqa.weight"].T
    latent = rms_norm(kv[:, :rank], w[p + "kv_a_layernorm.weight"], c["mla_norm_eps"])
    if c.get("mla_scale_q_lora"):
        q_latent = q_latent * (c["hidden_size"] / c["q_lora_rank"]) ** 0.5
    if c.get("mla_scale_kv_lora"):
        latent = latent * (c["hidden_size"] / rank) ** 0.5
    q = (q_latent @ w[p + "q_b_proj.weight"].T).view(t, heads, nope + rope)
    expanded = (latent @ w[p + "kv_b_proj.weight"].T).view(t, heads, nope + v_dim)
    k_rope = rotate(kv[:, None, rank:], positions, c["rope_theta"], rope, c["rope_interleave"])
    q_rope = rotate(q[..., nope:], positions, c["rope_theta"], rope, c["rope_interleave"])
    q = torch.cat([q[..., :nope], q_rope], -1)
    k = torch.cat([expanded[..., :nope], k_rope.expand(t, heads, rope)], -1)
    return attend(q, k, expanded[..., nope:], (nope + rope) ** -0.5) @ w[p + "o_proj.weight"].T


def attention_gqa(family, x, w, p, c, positions):
    t, d, eps = x.shape[0], c["head_dim"], c["rms_norm_eps"]

    def linear(name):
        y = x @ w[p + name + "_proj.weight"].T
        return y + w[p + name + "_proj.bias"] if p + name + "_proj.bias" in w else y

    q, k, v = linear("q").view(t, c["num_attention_heads"], -1), linear("k").view(t, -1, d), linear("v").view(t, -1, d)
    gate = None
    if family == "qwen3_next":  # each head's rows are its query, then its output gate
        q, gate = q[..., :d], q[..., d:]
    if p + "q_norm.weight" in w:
        zero_centred = family == "qwen3_next"
        q = rms_norm(q, w[p + "q_norm.weight"], eps, zero_centred)
        k = rms_norm(k, w[p + "k_norm.weight"], eps, zero_centred)
    dim = int(d * c.get("partial_rotary_factor", 1.0))
    interleaved = family == "ernie4_5_moe"
    q, k = (rotate(y, positions, c["rope_theta"], dim, interleaved) for y in (q, k))
    out = attend(q, k, v, d**-0.5, c.get("draft_window"))
    if gate is not None:
        out = out * gate.reshape(t, -1).sigmoid()
    return out @ w[p + "o_proj.weight"].T


def swiglu(x, w, p):
    hidden = torch.nn.functional.silu(x @ w[p + "gate_proj.weight"].T) * (x @ w[p + "up_proj.weight"].T)
    return hidden @ w[p + "down_proj.weight"].T


def route(family, x, w, p, c):
    """[(expert, weight), ...] for one token."""
    logits, top = w[p + "gate.weight"] @ x, c["num_experts_per_tok"]
    if family == "qwen3_next":
        scores = choice = logits.softmax(-1)
    else:
        scores = logits.sigmoid()
        choice = scores + w.get(p + "gate.e_score_correction_bias", 0.0)
        if c["n_group"] > 1:  # keep the topk_group groups with the largest sum of their two best choices
            groups = choice.view(c["n_group"], -1)
            kept = groups.topk(2, -1).values.sum(-1).topk(c["topk_group"]).indices
            mask = torch.full_like(groups, float("-inf"))
            mask[kept] = 0.0
            choice = (groups + mask).flatten()
    chosen = choice.topk(top).indices
    weight = scores[chosen]
    if c["norm_topk_prob"]:
        weight = weight / (weight.sum() if family == "qwen3_next" else weight.sum() + 1e-20)
    if family != "qwen3_next":
        weight = weight * c["routed_scaling_factor"]
    return list(zip(chosen.tolist(), weight, strict=True))


def feed_forward(family, x, w, p, c):
    if not _is_moe(family):
        return swiglu(x, w, p)
    rows = []
    for row in x:
        y = sum(weight * swiglu(row, w, f"{p}experts.{e}.") for e, weight in route(family, row, w, p, c))
        if family == "qwen3_next":
            y = y + (w[p + "shared_expert_gate.weight"] @ row).sigmoid() * swiglu(row, w, p + "shared_expert.")
        else:
            y = y + swiglu(row, w, p + "shared_experts.")
        rows.append(y)
    return torch.stack(rows)


def block(family, x, w, n, c, positions):
    b, eps, zero_centred = n["block"], c["rms_norm_eps"], family == "qwen3_next"

    def norm(y, name):
        return rms_norm(y, w[b + name + ".weight"], eps, zero_centred)

    def attention(y):
        if "kv_lora_rank" in c:
            return attention_mla(y, w, b + "self_attn.", c, positions)
        return attention_gqa(family, y, w, b + "self_attn.", c, positions)

    if c.get("sandwich_norm"):  # Pangu: a norm on both sides of attention and of the MLP
        x = x + norm(attention(norm(x, "input_layernorm")), "post_attention_layernorm")
        return x + norm(feed_forward(family, norm(x, "pre_mlp_layernorm"), w, n["mlp"], c), "post_mlp_layernorm")
    x = x + attention(norm(x, "input_layernorm"))
    return x + feed_forward(family, norm(x, "post_attention_layernorm"), w, n["mlp"], c)


def forward(family, config, weights, embeddings_of_next_tokens, features, positions, module=0):
    """One module over all slots at once: embeddings and features [T, H], positions [T] -> (hidden [T, H], logits)."""
    c, n = {**RULES[family], **config}, names(family, config, module)
    eps, zero_centred = c["rms_norm_eps"], family == "qwen3_next"
    embeddings, features, positions = (torch.as_tensor(x) for x in (embeddings_of_next_tokens, features, positions))
    embeddings, features = embeddings.double(), features.double()
    if c["zero_position_0"]:
        embeddings = embeddings * (positions != 0)[:, None]
    e = rms_norm(embeddings, weights[n["enorm"]], eps, zero_centred)
    h = rms_norm(features, weights[n["hnorm"]], eps, zero_centred)
    x = torch.cat([h, e] if c["hidden_first"] else [e, h], -1) @ weights[n["proj"]].T
    x = block(family, x, weights, n, c, positions)
    final = {"own": n["final"], "target": n["target_norm"], "none": None}[c["final_norm"]]
    normed = rms_norm(x, weights[final], eps, zero_centred) if final else x
    head = weights[n["head"]] if n["head"] in weights else weights["lm_head.weight"]
    return (normed if c["recur"] == "post" else x), normed @ head.T


def chain(family, config, weights, tokens, features, positions, k, mode="repeat"):
    """k greedy drafts after `tokens`; len(tokens) == len(features) + 1. Returns (drafts, their logits rows [k, V]).

    "repeat": module 0 again and again. A step adds one slot: the embedding of the newest draft, the hidden state that
      recurs from the previous step's last slot, the next position. Earlier slots keep their features.
    "modules": step j runs module j % n over the same T slots: features are the previous step's hidden states, the
      tokens are shifted left by one with the newest draft at the end, the positions stay."""
    tokens, positions, feats = list(tokens), torch.as_tensor(positions), torch.as_tensor(features).double()
    count, drafts, rows = feats.shape[0], [], []
    assert len(tokens) == count + 1 == len(positions) + 1
    for step in range(k):
        module = step % config["num_nextn_predict_layers"] if mode == "modules" else 0
        n = names(family, config, module)
        table = weights[n["embed"]] if n["embed"] in weights else weights["model.embed_tokens.weight"]
        following = (tokens + drafts)[1:] if mode == "repeat" else (tokens + drafts)[step + 1 :]
        hidden, logits = forward(family, config, weights, table[torch.tensor(following)], feats, positions, module)
        drafts.append(int(logits[-1].argmax()))
        rows.append(logits[-1])
        if mode == "repeat":
            feats = torch.cat([feats, hidden[-1:]])
            positions = torch.cat([positions, positions[-1:] + 1])
        else:
            feats = hidden
    return drafts, torch.stack(rows)
