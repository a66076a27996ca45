"""Float64 reference of the multi-token-prediction (MTP) modules of `mtp_checkpoints`. The Llama family, this project's
own, has DeepSeek's names and fusion around a Llama layer.

Plain torch, written from the papers' formulas and published facts; no engine or transformers code is used. No KV cache:
every call recomputes the whole sequence.

Slot convention (vLLM, SGLang): slot i holds the target's feature of token i, the embedding of token i+1, and the
position of token i. Its logits are about token i+2. With T features there are T+1 tokens: the last one is the token
the target has just chosen. (transformers counts the positions one higher; rotary attention only sees differences.)

  hidden, logits = forward(family, config, weights, embeddings_of_next_tokens, features, positions, module=0)
  drafts, logits = chain(family, config, weights, tokens, features, positions, k, mode="repeat" | "modules")

`hidden` is what recurs: the value to be used as `features` of the next step. The key draft_window of the config, an
option of the engine, limits attention to that many slots: a slot's own and those before it.
"""

import torch
from mtp_checkpoints import RULES, is_moe, names


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
    if not is_moe(family):
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
