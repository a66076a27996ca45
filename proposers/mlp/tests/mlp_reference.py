"""float64 reference of MLP speculators, on dicts with the published tensor names. It was written from the authors' code
(foundation-model-stack/fms-extras, speculator.py) without seeing the plugin.

The hidden state at position t is the target's after its final norm. Head i reads it with the tokens t + 1 to t + 1 + i,
of which the first is the request's last token, and predicts the token at t + 2 + i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PREFIX = "speculator."
EPS = 1e-6
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "emb_dim": 4096,
    "inner_dim": 0,
    "n_predict": 3,
    "top_k_tokens_per_head": [5, 4, 3],
    "n_candidates": 5,
    "tie_weights": False,
    "scale_input": False,
}
Config = Mapping[str, Any]
Weights = Mapping[str, Tensor]


def full_config(config: Config) -> dict[str, Any]:
    """Add the published defaults of absent keys. inner_dim 0 becomes emb_dim."""
    full = {**DEFAULTS, **config}
    full["inner_dim"] = full["inner_dim"] or full["emb_dim"]
    if len(full["top_k_tokens_per_head"]) != full["n_predict"]:
        raise ValueError("top_k_tokens_per_head needs one number per head")
    if full["tie_weights"] and full["n_predict"] < 2:
        raise ValueError("tie_weights needs n_predict > 1")
    return full


def key(config: Config, kind: str, i: int, field: str = "weight") -> str:
    """Return the name of the tensor that head i reads: of tied ones, the first."""
    if config["tie_weights"]:
        i = min(i, 1) if kind == "proj" else 0
    return f"{PREFIX}{kind}.{i}.{field}"


def shapes(config: Config, tied_storage: str = "once") -> dict[str, tuple[int, ...]]:
    """Return the shape of each published tensor. tied_storage: "once", as in safetensors files, or "all", under the
    names of all heads, as in pytorch_model.bin. The norm of scale_input has no tensors."""
    full = full_config(config)
    vocab, width, inner, num_heads = (full[name] for name in ("vocab_size", "emb_dim", "inner_dim", "n_predict"))
    count = dict.fromkeys(("emb", "proj", "head", "ln"), num_heads)
    if full["tie_weights"] and tied_storage == "once":
        count = {"emb": 1, "proj": 2, "head": 1, "ln": 1}
    found: dict[str, tuple[int, ...]] = {}
    for kind, number in count.items():
        for i in range(number):
            shape = {"proj": (inner, width if i == 0 else inner), "ln": (inner,)}.get(kind, (vocab, inner))
            found[f"{PREFIX}{kind}.{i}.weight"] = shape
            if kind == "ln":
                found[f"{PREFIX}ln.{i}.bias"] = (inner,)
    return found


def random_weights(config: Config, generator: torch.Generator, tied_storage: str = "once") -> dict[str, Tensor]:
    """Draw tensors, so large that a wrong scale, index or norm changes logits by whole units. Tied ones share their
    memory."""
    full, found = full_config(config), {}
    for name, shape in shapes(config, tied_storage).items():
        kind, i, field = name.removeprefix(PREFIX).split(".")
        home = key(full, kind, int(i), field)
        if home not in found:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            size = {"emb": 2.0, "proj": 1.0, "head": 5.0, "ln": 0.3}[kind]
            found[home] = (field == "weight") + size * drawn if kind == "ln" else size / math.sqrt(shape[1]) * drawn
        found[name] = found[home]
    return found


def random_hidden(config: Config, generator: torch.Generator, scale: float = 3.0) -> Tensor:
    """Draw a hidden state, float64 [emb_dim], with a root mean square far from 1, so that scale_input matters."""
    return scale * torch.randn(full_config(config)["emb_dim"], generator=generator, dtype=torch.float64)


def rms(x: Tensor) -> Tensor:
    """Divide by the root mean square. No mean is subtracted, though the published layer is called a layer norm."""
    return x / torch.sqrt((x * x).mean() + EPS)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))  # exact, not the tanh form


def start(config: Config, hidden: Tensor) -> Tensor:
    return rms(hidden.double()) / math.sqrt(2) if config["scale_input"] else hidden.double()


def step(weights: Weights, config: Config, i: int, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """Run head i. Returns the new state [inner_dim] and the logits [vocab]. config: from `full_config`."""

    def tensor(kind: str, field: str = "weight") -> Tensor:
        return weights[key(config, kind, i, field)].double()

    state_weight = 0.5 ** (0.5 / config["n_predict"])  # also if fewer heads run
    token_weight = math.sqrt((1 - state_weight * state_weight) * config["inner_dim"] / 2)
    x = tensor("proj") @ state + (token_weight / state_weight) * tensor("emb")[token]
    state = gelu(tensor("ln") * rms(x) + tensor("ln", "bias"))
    return state, tensor("head") @ state


def chain_logits(weights: Weights, config: Config, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the logits of the first len(tokens) heads, [len(tokens), vocab], for a hidden state [emb_dim]."""
    full, rows = full_config(config), []
    assert len(tokens) <= full["n_predict"]
    state = start(full, hidden)
    for i, token in enumerate(tokens):
        state, logits = step(weights, full, i, state, int(token))
        rows.append(logits)
    return torch.stack(rows)


def greedy_chain(weights: Weights, config: Config, hidden: Tensor, token: int, num_tokens: int) -> list[int]:
    """Return the most probable token of each head after the request's last token."""
    full, found = full_config(config), []
    state = start(full, hidden)
    for i in range(num_tokens):
        state, logits = step(weights, full, i, state, found[-1] if found else int(token))
        found.append(int(logits.argmax()))
    return found


def candidates(weights: Weights, config: Config, hidden: Tensor, token: int) -> tuple[list[list[int]], list[float]]:
    """Return the n_candidates most probable paths, best first, and their log-probs.

    Every path with one of the top_k[i] best tokens of head i at depth i is computed; none is pruned on the way. The
    log-probs are over the whole vocabulary. Raises ValueError if n_candidates is larger than the number of paths.
    """
    full = full_config(config)
    if full["n_candidates"] > math.prod(full["top_k_tokens_per_head"]):
        raise ValueError("n_candidates exceeds the number of paths")
    paths: list[tuple[tuple[int, ...], float, Tensor]] = [((), 0.0, start(full, hidden))]
    for i, k in enumerate(full["top_k_tokens_per_head"]):
        grown = []
        for path, score, state in paths:
            left, logits = step(weights, full, i, state, path[-1] if path else int(token))
            best = torch.log_softmax(logits, 0).topk(k)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            grown += [((*path, token_id), score + log_prob, left) for log_prob, token_id in pairs]
        paths = grown
    best_paths = sorted(paths, key=lambda each: -each[1])[: full["n_candidates"]]
    return [list(path) for path, _, _ in best_paths], [score for _, score, _ in best_paths]


def prefix_tree(token: int, sequences: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Merge the common beginnings of paths. Returns (token, parent, depth) of each node in the order of first
    appearance; node 0 is the request's last token, with parent -1."""
    nodes, seen = [(int(token), -1, 0)], {(): 0}
    for sequence in sequences:
        for depth, token_id in enumerate(sequence, 1):
            path = tuple(sequence[:depth])
            if path not in seen:
                seen[path] = len(nodes)
                nodes.append((int(token_id), seen[path[:-1]], depth))
    return nodes
