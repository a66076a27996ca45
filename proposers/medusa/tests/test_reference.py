"""Tests of the reference implementation: against library operations and brute force, with mistakes that must show."""

from __future__ import annotations

import itertools

import medusa_reference as medusa
import pytest
import torch
from torch.nn.functional import linear, silu

HIDDEN_SIZE, VOCAB_SIZE = 24, 60
CASES = [
    case
    for case in itertools.product((1, 5), (0, 1, 2), (True, False), (True, False))
    if case[1] or (case[2] and not case[3])
]


def drawn(case):
    """Return weights, a hidden state, the target's LM head and the generator that drew them."""
    heads, layers, own_head, share_layers = case
    generator = torch.Generator().manual_seed(3)
    weights = medusa.random_weights(
        heads, layers, HIDDEN_SIZE, VOCAB_SIZE, generator, own_head=own_head, share_layers=share_layers
    )
    hidden = torch.randn(HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    lm_head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    return weights, hidden, lm_head, generator


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_equal_those_of_library_operations(case):
    (heads, layers, *_), (weights, hidden, lm_head, _) = case, drawn(case)
    found = medusa.head_logits(weights, hidden, layers, lm_head)
    assert medusa.num_heads(weights) == len(found) == heads
    for i in range(heads):
        x = hidden
        for layer in range(layers):
            x = x + silu(linear(x, *(weights[f"{i}.{layer}.linear.{kind}"] for kind in ("weight", "bias"))))
        torch.testing.assert_close(found[i], weights.get(f"{i}.{layers}.weight", lm_head) @ x, rtol=0, atol=1e-10)
    prefixed = {"medusa_head." + name: tensor for name, tensor in weights.items()}
    assert torch.equal(medusa.head_logits(prefixed, hidden, layers, lm_head, prefix="medusa_head."), found)


@pytest.mark.parametrize("case", [case for case in CASES if case[2]], ids=str)
def test_both_layouts_have_the_same_logits(case):
    (heads, layers, *_), (weights, hidden, lm_head, generator) = case, drawn(case)
    found = medusa.head_logits(weights, hidden, layers)
    config = {"num_heads": heads, "num_hidden_layers": layers, "vocab_size": VOCAB_SIZE, "medusa_fc_bias": True}
    renamed = medusa.to_vllm(weights, layers)
    torch.testing.assert_close(medusa.vllm_logits(renamed, config, hidden), found, rtol=0, atol=1e-12)
    if layers:
        without = medusa.vllm_logits(renamed, config | {"medusa_fc_bias": False}, hidden)
        assert float((without - found).abs().max()) > 0.1

    token_map = torch.randperm(VOCAB_SIZE, generator=generator)[:20]
    cut = {name: tensor[token_map] if name.startswith("lm_heads") else tensor for name, tensor in renamed.items()}
    for stored in (renamed, cut):
        some = medusa.vllm_logits(stored | {"token_map": token_map}, config | {"truncated_vocab_size": 20}, hidden)
        torch.testing.assert_close(some[:, token_map], found[:, token_map])
        assert int(some.isinf().sum()) == heads * (VOCAB_SIZE - 20)

    shared = config | {"original_lm_head": True}
    layers_alone = {name: tensor for name, tensor in renamed.items() if not name.startswith("lm_heads")}
    both = [
        medusa.vllm_logits(layers_alone | {name: lm_head}, shared, hidden)
        for name in ("lm_head.weight", "lm_heads.0.weight")
    ]
    assert torch.equal(*both)


def test_nodes_of_a_tree_have_the_tokens_of_their_ranks():
    choices = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (2,), (1, 0), (0, 0, 2)]
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nodes = medusa.tree_candidates(logits, 9, choices)
    paths = []
    for token, parent, depth in nodes:
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert len(paths[-1]) == depth + 1
    best = logits.topk(10).indices.tolist()
    assert set(paths) == {(9, *(best[i][rank] for i, rank in enumerate(choice))) for choice in [(), *choices]}
    for wrong in ([(0,), (0,)], [(0, 0)]):
        with pytest.raises(ValueError, match="duplicate choice or missing parent"):
            medusa.tree(wrong)


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_the_most_valuable_nodes(seed):
    """If accuracies fall with the rank, no other tree of as many nodes has a higher value."""
    accuracies = torch.rand(4, 5, generator=torch.Generator().manual_seed(seed)).sort(descending=True).values
    accuracies = (accuracies / accuracies.sum(1, keepdim=True) * torch.tensor([[0.9], [0.7], [0.5], [0.4]])).tolist()
    paths = [path for depth in range(1, 5) for path in itertools.product(range(5), repeat=depth)]
    paths.sort(key=lambda path: -medusa.node_value(accuracies, path))
    found = medusa.choices_from_accuracies(accuracies, 40)
    assert set(found) == set(paths[:40])
    values = [medusa.node_value(accuracies, path) for path in found]
    assert values == sorted(values, reverse=True)


def test_the_search_follows_the_authors_rule_elsewhere():
    odd = [[0.1, 0.5], [0.3, 0.2]]  # a later rank is better: it is reached through the earlier one alone
    assert medusa.choices_from_accuracies(odd, 3) == [(0,), (1,), (1, 0)]
    ties = [[0.5, 0.25], [0.5, 0.25]]
    assert medusa.choices_from_accuracies(ties, 6) == [(0,), (1,), (0, 0), (1, 0), (0, 1), (1, 1)]
    assert medusa.choices_from_accuracies([[0.5, 0.0]], 6) == [(0,)]
    assert medusa.per_rank([[0.5, 0.7, 0.75]])[0] == pytest.approx([0.5, 0.2, 0.05])
