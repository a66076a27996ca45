"""float64 reference of Medusa heads, their trees, and the search for a tree. It was written from the authors' code
(FasterDecoding/Medusa: medusa_model.py, utils.py, gen_results.py) and vLLM's (models/medusa.py), without seeing the
plugin.

The hidden state at position t is the target's after its final norm. The target's LM head predicts the token at t + 1
from it, and head i the token at t + 2 + i, independently of the other heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Path = tuple[int, ...]


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def num_heads(weights: Weights, prefix: str = "") -> int:
    """Count the heads by the names of FasterDecoding's layout. config.json may give another number: the published heads
    v1.3 are five, and their config.json has two."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.\d+\.(?:linear\.)?weight$")
    return 1 + max(int(match[1]) for name in weights if (match := pattern.match(name)))


def head_logits(
    weights: Weights, hidden: Tensor, num_layers: int = 1, lm_head: Tensor | None = None, prefix: str = ""
) -> Tensor:
    """Return the logits [num_heads, vocab] of heads in FasterDecoding's layout.

    prefix: "" in medusa_lm_head files, "medusa_head." in files of whole models.
    lm_head: the target's, [vocab, hidden], for heads without a tensor "{head}.{num_layers}.weight" ("version": "2").
    """
    rows = []
    for i in range(num_heads(weights, prefix)):
        x = hidden.double()
        for layer in range(num_layers):
            name = f"{prefix}{i}.{layer}.linear."
            x = x + silu(weights[name + "weight"].double() @ x + weights[name + "bias"].double())
        output = weights.get(f"{prefix}{i}.{num_layers}.weight", lm_head)
        assert output is not None
        rows.append(output.double() @ x)
    return torch.stack(rows)


def vllm_logits(weights: Weights, config: Mapping[str, Any], hidden: Tensor, prefix: str = "") -> Tensor:
    """Return the logits [num_heads, vocab_size] of heads in vLLM's layout; -inf for tokens that token_map lacks.

    config: num_heads, vocab_size, num_hidden_layers, truncated_vocab_size (None: all), medusa_fc_bias,
        original_lm_head, logit_scale.
    """
    size, rows = config["vocab_size"], []
    token_map = weights.get(prefix + "token_map") if (config.get("truncated_vocab_size") or size) < size else None
    for i in range(config["num_heads"]):
        x = hidden.double()
        for layer in range(config["num_hidden_layers"]):
            name = f"{prefix}blocks.{i}.layers.{layer}."
            y = weights[name + "weight"].double() @ x
            x = x + silu(y + weights[name + "bias"].double() if config.get("medusa_fc_bias", False) else y)
        if config.get("original_lm_head", False):  # one matrix for all heads, stored under either name
            output = weights.get(prefix + "lm_head.weight", weights.get(prefix + "lm_heads.0.weight"))
        else:
            output = weights[f"{prefix}lm_heads.{i}.weight"]
        if token_map is not None and len(output) > len(token_map):
            output = output[token_map]
        logits = (output.double() @ x) * config.get("logit_scale", 1.0)
        if token_map is not None:
            full = torch.full((size,), -math.inf, dtype=torch.float64)
            full[token_map] = logits
            logits = full
        rows.append(logits)
    return torch.stack(rows)


def random_weights(
    heads: int,
    layers: int,
    hidden: int,
    vocab: int,
    generator: torch.Generator,
    *,
    own_head: bool = True,
    share_layers: bool = False,
    prefix: str = "",
) -> dict[str, Tensor]:
    """Draw tensors in FasterDecoding's layout. share_layers: all layers of a head are the same, as its trainer writes
    them."""

    def drawn(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    found: dict[str, Tensor] = {}
    for i in range(heads):
        for layer in range(layers):
            name, first = f"{prefix}{i}.{layer}.linear.", f"{prefix}{i}.0.linear."
            is_new = layer == 0 or not share_layers
            weight = drawn(hidden, hidden, scale=1.5 / math.sqrt(hidden)) if is_new else found[first + "weight"]
            found[name + "weight"] = weight
            found[name + "bias"] = drawn(hidden, scale=0.7) if is_new else found[first + "bias"]
        if own_head:
            found[f"{prefix}{i}.{layers}.weight"] = drawn(vocab, hidden, scale=2.0 / math.sqrt(hidden))
    return found


def to_vllm(weights: Weights, layers: int, *, bias: bool = True) -> dict[str, Tensor]:
    """Rename tensors from FasterDecoding's layout to vLLM's. bias: False drops the biases, as the published file
    did."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        i, layer, rest = name.split(".", 2)
        if int(layer) == layers:
            found[f"lm_heads.{i}.weight"] = tensor
        elif bias or rest.endswith("weight"):
            found[f"blocks.{i}.layers.{layer}.{rest.split('.')[-1]}"] = tensor
    return found


def tree(choices: Sequence[Sequence[int]]) -> list[tuple[int, int, int, int]]:
    """Return (head, rank, parent, depth) of each node of a tree given as medusa_choices. Node 0 is the request's last
    token, with head -1.

    A choice (r1, .., rd) is a node at depth d, a child of (r1, .., r(d - 1)): the token that head d - 1 ranks at place
    rd. Nodes are ordered by depth, then by their paths. Raises ValueError for a duplicate or a missing parent.
    """
    paths = sorted((tuple(choice) for choice in choices), key=lambda path: (len(path), path))
    index: dict[Path, int] = {(): 0, **{path: n for n, path in enumerate(paths, 1)}}
    if len(index) != len(paths) + 1 or any(path[:-1] not in index for path in paths):
        raise ValueError("duplicate choice or missing parent")
    return [(-1, 0, -1, 0)] + [(len(path) - 1, path[-1], index[path[:-1]], len(path)) for path in paths]


def tree_candidates(logits: Tensor, token: int, choices: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Return (token, parent, depth) of each node for the logits [num_heads, vocab] of one request. All nodes at a depth
    have tokens of the same head, whatever they follow. token: the request's last token."""
    ranked = logits.sort(dim=-1, descending=True, stable=True).indices
    return [(int(token) if d == 0 else int(ranked[head, rank]), above, d) for head, rank, above, d in tree(choices)]


def node_value(accuracies: Sequence[Sequence[float]], path: Path) -> float:
    return math.prod(float(accuracies[i][rank]) for i, rank in enumerate(path))


def choices_from_accuracies(accuracies: Sequence[Sequence[float]], num_nodes: int) -> list[Path]:
    """Return the tree that the authors' search finds, as medusa_choices in the order in which it adds them.

    It begins with (0,). Each round adds the most valuable of the next siblings and first children of all nodes so far;
    of equally valuable ones, that of the earlier node, and its sibling before its child. It ends early if no other node
    has a positive value.

    accuracies: accuracies[i][r] is the share of tokens that rank r of head i gets right (that rank alone).
    """
    kept: list[Path] = [(0,)] if num_nodes > 0 else []
    while 0 < len(kept) < num_nodes:
        best, best_value = None, 0.0
        for path in kept:
            sibling, child = (*path[:-1], path[-1] + 1), (*path, 0)
            near = [sibling] if sibling[-1] < len(accuracies[len(path) - 1]) else []
            near += [child] if len(path) < len(accuracies) else []
            for other in near:
                if other not in kept and node_value(accuracies, other) > best_value:
                    best, best_value = other, node_value(accuracies, other)
        if best is None:
            break
        kept.append(best)
    return kept


def per_rank(cumulative: Sequence[Sequence[float]]) -> list[list[float]]:
    """Turn the shares of tokens among the best 1, 2, ... guesses into the share of each rank alone."""
    return [[b - a for a, b in zip([0.0, *row], row, strict=False)] for row in cumulative]
