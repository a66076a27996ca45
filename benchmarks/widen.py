"""Widens the tensors of a Llama model, and of drafts for it, without changing what they compute.

Every hidden state of the wide model is the narrow model's, several times over: a norm divides by the same number, and a
linear layer that reads it has its weights several times over, too, in shares that add up to 1. All shares are powers
of two, so that bfloat16 holds the weights exactly. Rounding differs only in the order of sums.

Heads stay as wide as they are, since rotary embeddings and the scale of attention depend on it: there are more of them.
The vocabulary stays, too: no row of an LM head makes a token impossible.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from attrs import frozen

NORM = ("hidden",)
RULES: dict[str, tuple[str, ...]] = {
    r"(.*\.)?embed_tokens\.weight": ("", "hidden"),
    r"(.*\.)?lm_heads?(\.\d+)?\.weight": ("", "/hidden"),
    r".*\.q_proj\.weight": ("heads", "/hidden"),
    r".*\.[kv]_proj\.weight": ("kv_heads", "/hidden"),
    r".*\.o_proj\.weight": ("hidden", "/heads"),
    r".*\.(gate|up)_proj\.weight": ("intermediate", "/hidden"),
    r".*\.down_proj\.weight": ("hidden", "/intermediate"),
    r"(.*[._])?[a-z]*norm\.weight": NORM,
    r"(.*\.)?(fc|eh_proj)\.weight": ("hidden", "/hidden"),  # of embedding and hidden states, concatenated
    r"fc\.bias": NORM,
    r"blocks\.\d+\.layers\.\d+\.weight": ("hidden", "/hidden"),  # of Medusa
    r"blocks\.\d+\.layers\.\d+\.bias": NORM,
    r"speculator\.emb\.\d+\.weight": ("", "inner"),  # of an MLP speculator, as the next ones
    r"speculator\.head\.\d+\.weight": ("", "/inner"),
    r"speculator\.ln\.\d+\.(weight|bias)": ("inner",),
    r"speculator\.proj\.0\.weight": ("inner", "/hidden"),
    r"speculator\.proj\.[1-9]\d*\.weight": ("inner", "/inner"),
    r"d2t|t2d|token_map": (),
}
"""What the dimensions of a tensor are, by its name. With a slash: what a linear layer reads. Empty: it stays."""


@frozen
class Widths:
    """How many times as wide a model becomes.

    hidden: the hidden states, and the number of query heads.
    intermediate: the MLPs.
    kv_heads: the number of key and value heads. `hidden` is a multiple of it.
    inner: the states of an MLP speculator. A power of four: its embedding's share depends on the square root.
    """

    hidden: int
    intermediate: int
    kv_heads: int
    inner: int = 1

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The wide model's config.json."""
        wide = {**config}
        factors = {
            ("hidden_size", "target_hidden_size", "emb_dim", "num_attention_heads"): self.hidden,
            ("intermediate_size",): self.intermediate,
            ("num_key_value_heads",): self.kv_heads,
            ("inner_dim",): self.inner,
        }
        for keys, factor in factors.items():
            wide |= {key: factor * config[key] for key in keys if key in config}
        if "num_attention_heads" in config:
            wide["head_dim"] = _head_dim(config)
            wide["tie_word_embeddings"] = False  # the LM head's weights are shares of the embedding's
        return wide

    def tensors(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The wide model's tensors, on the same device. Raises ValueError for a name that no rule is known for.

        config: the narrow model's config.json.
        """
        tensors = dict(tensors)
        if config.get("tie_word_embeddings") and "lm_head.weight" not in tensors and "model.norm.weight" in tensors:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        sources = dict(self._sources(config))
        return {name: self._widened(name, tensor, sources) for name, tensor in tensors.items()}

    def _sources(self, config: Mapping[str, Any]) -> Iterable[tuple[str, list[int]]]:
        """For each kind of dimension, the index in the narrow model of each index in the wide one."""
        for kind, key, factor in (
            ("hidden", "hidden_size", self.hidden),
            ("hidden", "emb_dim", self.hidden),
            ("intermediate", "intermediate_size", self.intermediate),
            ("inner", "inner_dim", self.inner),
        ):
            if key in config:
                yield kind, factor * [*range(config[key])]
        if "num_attention_heads" in config:
            num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
            group, wide_group = num_heads // num_kv_heads, self.hidden * num_heads // (self.kv_heads * num_kv_heads)
            kv_heads = self.kv_heads * [*range(num_kv_heads)]
            heads = [kv_head * group + i % group for kv_head in kv_heads for i in range(wide_group)]
            yield "kv_heads", _elements(kv_heads, _head_dim(config))
            yield "heads", _elements(heads, _head_dim(config))

    def _widened(self, name: str, tensor: torch.Tensor, sources: Mapping[str, list[int]]) -> torch.Tensor:
        kinds = next((kinds for pattern, kinds in RULES.items() if re.fullmatch(pattern, name)), None)
        if kinds is None:
            raise ValueError(f"it is not known how to widen {name!r}: add a rule to RULES")
        for dim, kind in enumerate(kinds):
            if not kind:
                continue
            source = sources[kind.removeprefix("/")]
            size = len(set(source))
            parts = range(0, tensor.shape[dim], size)  # several, where hidden states are concatenated
            index = torch.tensor([first + i for first in parts for i in source], device=tensor.device)
            tensor = tensor.index_select(dim, index)
            if kind.startswith("/"):
                shares = torch.tensor(len(parts) * _shares(source), dtype=tensor.dtype, device=tensor.device)
                tensor = tensor.mul_(shares)
        if name.startswith("speculator.emb."):
            tensor = tensor / self.inner**0.5
        return tensor.contiguous()


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _elements(heads: list[int], width: int) -> list[int]:
    return [head * width + i for head in heads for i in range(width)]


def _shares(source: list[int]) -> list[float]:
    """Powers of two, which add up to 1 for each number in the list."""
    numbers, seen, shares = Counter(source), Counter[int](), []
    for i in source:
        number, low = numbers[i], 1 << (numbers[i] - 1).bit_length()
        shares.append((1 if seen[i] < 2 * number - low else 2) / low)
        seen[i] += 1
    return shares
