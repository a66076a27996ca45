"""The Llama decoder layer of a draft head in float64, for one causal sequence and without a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]


class Head:
    """A draft head's tensors in float64 and the operations of a Llama decoder layer. They take one sequence, [s, ...],
    whose first position is 0."""

    def __init__(self, tensors: Tensors, config: Config, embed: Callable[[Tensor], Tensor]) -> None:
        _refuse_unknown(config)
        self.config = config
        self.num_layers: int = config.get("num_hidden_layers", 1)
        self._tensors = tensors
        self._embed = embed
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        self._used.add(name)
        return self._tensors[name].double()

    def check_all_used(self) -> None:
        """Raise ValueError if the head has a tensor that no operation has used, which means that the config does not
        fit the tensors. d2t and t2d are exempt."""
        if unused := sorted(self._tensors.keys() - self._used - {"d2t", "t2d"}):
            raise ValueError(f"tensors without use in this head: {unused}")

    def embeddings(self, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor(token_ids)
        if self.has("embed_tokens.weight"):
            return self.tensor("embed_tokens.weight")[ids]
        return self._embed(ids).double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.tensor(f"{name}.weight").T
        return y + self.tensor(f"{name}.bias") if self.has(f"{name}.bias") else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        mean_square = x.pow(2).mean(dim=-1, keepdim=True)
        return self.tensor(f"{name}.weight") * x / (mean_square + self.config.get("rms_norm_eps", 1e-6)).sqrt()

    def layer(self, name: str, x: Tensor, residual: Tensor) -> Tensor:
        """Return the output of a decoder layer, [s, hidden_size].

        name: the layer's prefix in the names of its tensors.
        x: the input of attention, [s, ...].
        residual: the hidden states to which the output of attention is added, [s, hidden_size].
        """
        h = residual + self._attention(f"{name}.self_attn", x)
        return h + self._mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", h))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate = self.linear(f"{name}.gate_proj", x)
        return self.linear(f"{name}.down_proj", gate * torch.sigmoid(gate) * self.linear(f"{name}.up_proj", x))

    def _attention(self, name: str, x: Tensor) -> Tensor:
        num_heads = self.config["num_attention_heads"]
        num_kv_heads = self.config.get("num_key_value_heads") or num_heads
        angles = torch.arange(len(x)).double()[:, None] * inverse_frequencies(self.config)
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(diagonal=1)
        if window := self.config.get("draft_window"):  # the engine's option, not part of the head
            hidden |= torch.ones(len(x), len(x), dtype=torch.bool).tril(diagonal=-window)
        queries = self.linear(f"{name}.q_proj", x).chunk(num_heads, dim=-1)
        keys = self.linear(f"{name}.k_proj", x).chunk(num_kv_heads, dim=-1)
        values = self.linear(f"{name}.v_proj", x).chunk(num_kv_heads, dim=-1)
        outputs = []
        for i, query in enumerate(queries):
            group = i * num_kv_heads // num_heads
            query, key = self._head_norm(f"{name}.q_norm", query), self._head_norm(f"{name}.k_norm", keys[group])
            scores = rotate(query, angles) @ rotate(key, angles).T / sqrt(query.shape[-1])
            outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ values[group])
        return self.linear(f"{name}.o_proj", torch.cat(outputs, dim=-1))

    def _head_norm(self, name: str, x: Tensor) -> Tensor:
        """Apply Qwen3's norm to the queries or keys of one attention head. Returns x unchanged if the draft head has no
        weight for this norm."""
        return self.norm(name, x) if self.has(f"{name}.weight") else x


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply Llama's rotary embedding, which rotates dimensions j and j + head_dim / 2 together.

    x: [s, head_dim], the queries or keys of one attention head.
    angles: [s, head_dim / 2].
    """
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)


def inverse_frequencies(config: Config) -> Tensor:
    """Return the rotary angle per position of each pair of dimensions, float64 [head_dim / 2]. The config may have the
    old keys (rope_theta, rope_scaling) or the new one (rope_parameters)."""
    rope = _rope(config)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = [rope["theta"] ** (-2 * j / head_dim) for j in range(head_dim // 2)]
    if rope["type"] == "linear":
        frequencies = [frequency / rope["factor"] for frequency in frequencies]
    if rope["type"] == "llama3":
        frequencies = [_llama3_frequency(frequency, rope) for frequency in frequencies]
    return torch.tensor(frequencies, dtype=torch.float64)


def _llama3_frequency(frequency: float, rope: Mapping[str, Any]) -> float:
    turns = rope["original_max_position_embeddings"] * frequency / (2 * pi)  # within the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return float(kept * frequency + (1 - kept) * frequency / rope["factor"])


def _rope(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    return {**rope, "theta": theta, "type": rope.get("rope_type", rope.get("type", "default"))}


def _refuse_unknown(config: Config) -> None:
    """Raise NotImplementedError if the config has a value that this reference implementation does not support."""
    rope = _rope(config)
    rotated = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    asked: dict[str, tuple[Any, set[Any]]] = {
        "rope type": (rope["type"], {"default", "linear", "llama3"}),
        "partial_rotary_factor": (rotated, {1.0}),
        "hidden_act": (config.get("hidden_act", "silu"), {"silu"}),
        "sliding window": ("sliding_attention" in (config.get("layer_types") or ()), {False}),
    }
    for name, (value, allowed) in asked.items():
        if value not in allowed:
            raise NotImplementedError(f"{name} is {value!r}: this reference does {sorted(allowed)}")
