"""The example of a verifier: its rule, by hand, and where it is lossy."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from packages import GREEDY, RELAXED, SEEDED, generate, make_llm

from specdec_core import Draft, DraftTree


def test_relaxed_acceptance_is_lossy_above_temperature_0_only(target: Path) -> None:
    config = {"method": "logitspec", "num_speculative_tokens": 6, "verifier": RELAXED, "relaxed_ratio": 0.1}
    greedy, sampled = (generate(make_llm(target, config), params) for params in (GREEDY, SEEDED))
    plain = generate(make_llm(target), GREEDY)
    assert [each.outputs[0].token_ids for each in greedy] == [each.outputs[0].token_ids for each in plain]
    assert ([each.lossless for each in greedy], [each.lossless for each in sampled]) == ([True] * 3, [False] * 3)


def accepted_by_hand(probs: list[list[float]], tree: DraftTree, top_k: int, ratio: float) -> list[int]:
    """Return the rows of the longest path of draft tokens that are likely enough. Row 0 is the root's, row i + 1
    that of node i."""
    best, paths = [0], {-1: [0]}
    for node, (token_id, parent) in enumerate(zip(*tree, strict=True)):
        row = probs[parent + 1]
        likely = row[token_id] >= max(sorted(row, reverse=True)[top_k - 1], ratio * max(row))
        if parent in paths and likely:
            paths[node] = [*paths[parent], node + 1]
            best = paths[node] if len(paths[node]) > len(best) else best
    return best


@pytest.mark.parametrize(("top_k", "ratio"), [(1, 0.5), (2, 0.01), (6, 0.6), (3, 0.3)])
def test_relaxed_acceptance_takes_the_longest_path(top_k: int, ratio: float) -> None:
    plugin = importlib.import_module(RELAXED)
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for _ in range(50):
        trees = [random_tree(generator) for _ in range(3)]
        logits = torch.randn((sum(1 + len(tree.token_ids) for tree in trees), 6), generator=generator)
        verifier = plugin.Relaxed(plugin.RelaxedConfig(top_k, ratio))
        verdict = verifier.verify(logits, Draft.from_trees(trees), Likeliest())
        first = 0
        for tree, rows, num_accepted in zip(trees, verdict.rows, verdict.num_accepted.tolist(), strict=True):
            probs = logits[first : first + 1 + len(tree.token_ids)].softmax(-1).tolist()
            expected = accepted_by_hand(probs, tree, top_k, ratio)
            assert (rows[: num_accepted + 1] - first).tolist() == expected
            lengths.add(num_accepted)
            first += len(probs)
    assert len(lengths) > 2


def random_tree(generator: torch.Generator) -> DraftTree:
    """Return a tree of five nodes, of six tokens. Siblings differ."""
    tree = DraftTree([], [])
    while len(tree.token_ids) < 5:
        token_id = int(torch.randint(6, (1,), generator=generator))
        parent = int(torch.randint(-1, len(tree.token_ids), (1,), generator=generator))
        if (token_id, parent) not in zip(*tree, strict=True):
            tree.token_ids.append(token_id)
            tree.parents.append(parent)
    return tree


class Likeliest:
    """A random source that always draws the likeliest token."""

    def target_token(self, weights: torch.Tensor, requests: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        return weights.argmax(-1)
