"""Tests of the reference implementation: against a second formulation and brute force, with mistakes that must show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import mlp_reference as mlp
import pytest
import torch
from torch.nn.functional import embedding, gelu, linear, rms_norm

CASES = [
    {"inner_dim": inner, "tie_weights": tied, "scale_input": scaled, "n_predict": n}
    for inner, tied, scaled, n in itertools.product((0, 24, 40), (False, True), (False, True), (2, 4))
]


def drawn(case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor, list[int]]:
    """Return a config, weights, a hidden state and a token for each head."""
    config = {"vocab_size": 50, "emb_dim": 32, "top_k_tokens_per_head": [4, 3, 2, 2][: case["n_predict"]], **case}
    generator = torch.Generator().manual_seed(7)
    weights, hidden = mlp.random_weights(config, generator), mlp.random_hidden(config, generator)
    return config, weights, hidden, torch.randint(50, (case["n_predict"],), generator=generator).tolist()


def second_formula(weights: mlp.Weights, config: mlp.Config, hidden: torch.Tensor, tokens: Sequence[int]) -> Any:
    """Compute the logits with other algebra: the state and the embedding are weighted before they are added, and
    torch's operations replace hand-written ones."""
    config = mlp.full_config(config)
    size, state_weight, rows = config["inner_dim"], 2.0 ** (-0.5 / config["n_predict"]), []
    state = rms_norm(hidden, hidden.shape, eps=1e-6) / 2**0.5 if config["scale_input"] else hidden
    for i, token in enumerate(tokens):
        own, proj = (0, min(i, 1)) if config["tie_weights"] else (i, i)
        x = state_weight * linear(state, weights[f"speculator.proj.{proj}.weight"])
        x = x + math.sqrt((1 - state_weight**2) * size / 2) * embedding(
            torch.tensor(token), weights[f"speculator.emb.{own}.weight"]
        )
        normed = rms_norm(x / state_weight, (size,), weights[f"speculator.ln.{own}.weight"], 1e-6)
        state = gelu(normed + weights[f"speculator.ln.{own}.bias"])
        rows.append(linear(state, weights[f"speculator.head.{own}.weight"]))
    return torch.stack(rows)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_equal_those_of_a_second_formulation(case):
    config, weights, hidden, tokens = drawn(case)
    found = mlp.chain_logits(weights, config, hidden, tokens)
    torch.testing.assert_close(found, second_formula(weights, config, hidden, tokens), rtol=0, atol=1e-9)
    chain = mlp.greedy_chain(weights, config, hidden, tokens[0], len(tokens))
    assert mlp.chain_logits(weights, config, hidden, [tokens[0], *chain[:-1]]).argmax(-1).tolist() == chain


@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_mistakes_change_logits(case):
    config, weights, hidden, tokens = drawn(case)
    one_more = {"n_predict": len(tokens) + 1, "top_k_tokens_per_head": [1] * (len(tokens) + 1)}
    wrong = [
        (config | one_more, hidden, tokens),
        (config | {"scale_input": not config["scale_input"]}, hidden, tokens),
        (config, hidden, tokens[::-1]),
        (config, hidden, [tokens[-1], *tokens[:-1]]),
        *([] if config["scale_input"] else [(config, 2 * hidden, tokens)]),
    ]
    base = mlp.chain_logits(weights, config, hidden, tokens)
    if not config["tie_weights"]:
        weights |= one_more_head(weights, len(tokens))
    for changed in wrong:
        assert float((mlp.chain_logits(weights, *changed) - base).abs().max()) > 0.1


def one_more_head(weights: mlp.Weights, n: int) -> dict[str, torch.Tensor]:
    return {name.replace(f".{n - 1}.", f".{n}."): tensor for name, tensor in weights.items() if f".{n - 1}." in name}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tied_tensors_stored_for_every_head_are_the_same(case):
    config, weights, hidden, tokens = drawn(case)
    every = mlp.random_weights(config, torch.Generator().manual_seed(7), "all")
    assert (len(weights), len(every)) == (6 if case["tie_weights"] else 5 * len(tokens), 5 * len(tokens))
    assert all(torch.equal(every[name], tensor) for name, tensor in weights.items())
    found = [mlp.chain_logits(stored, config, hidden, tokens) for stored in (weights, every)]
    assert torch.equal(*found)


@pytest.mark.parametrize("case", CASES[1::5], ids=str)
def test_the_paths_of_a_tree_are_the_best_of_all(case):
    config, weights, hidden, (token, *_) = drawn(case)
    paths: list[tuple[float, list[int]]] = []
    for ranks in itertools.product(*map(range, config["top_k_tokens_per_head"])):
        path, score = [], 0.0
        for i, rank in enumerate(ranks):
            log_probs = mlp.chain_logits(weights, config, hidden, [token, *path])[i].log_softmax(0)
            ordered = log_probs.sort(descending=True)
            path.append(int(ordered.indices[rank]))
            score += float(ordered.values[rank])
        paths.append((score, path))
    paths.sort(key=lambda each: -each[0])
    found, scores = mlp.candidates(weights, config, hidden, token)
    assert found == [path for _, path in paths[:5]]
    assert scores == pytest.approx([score for score, _ in paths[:5]], abs=1e-9)
    nodes = mlp.prefix_tree(token, found)
    assert len(nodes) == 1 + len({tuple(path[:depth]) for path in found for depth in range(1, len(path) + 1)})
    for path in found:
        at = 0
        for depth, token_id in enumerate(path, 1):
            at = nodes.index((token_id, at, depth))
