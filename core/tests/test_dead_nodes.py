"""Dead (padding) nodes: that the conformance kit notices verifiers which count them, and what else must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from specdec_core.config.verifiers import TypicalConfig
from specdec_core.contracts import draft as contract
from specdec_core.contracts.draft import DEAD, Draft, DraftTree, TreeLayout
from specdec_core.sampling.constraints import Paths
from specdec_core.sampling.random import CounterRandom
from specdec_core.verifiers.block import BlockVerifier
from specdec_core.verifiers.chosen import ChosenVerifier
from specdec_core.verifiers.greedy import GreedyVerifier
from specdec_core.verifiers.rejection import RejectionVerifier
from specdec_core.verifiers.traversal import TraversalVerifier
from specdec_core.verifiers.typical import TypicalVerifier
from specdec_testing.conformance.shapes import DEAD_CHAINS as CHAINS, DEAD_TREES as TREES, PAIRS
from specdec_testing.drawn_batches import joint_error
from specdec_testing.drawn_trees import Model, Shape, emit, random_model

Patch = pytest.MonkeyPatch


def models(vocab: int, seed: int) -> tuple[Model, Model]:
    return random_model(vocab, 4, seed), random_model(vocab, 4, seed + 1000, impossible=0)


# The check notices counts of nodes in the place of live ones


def worst_error(rule: Any, shape: Shape, vocab: int = 3) -> float:
    return max(emit(rule, *models(vocab, seed), shape).error for seed in range(2))


def length_is_the_number_of_nodes(patch: Patch) -> None:
    patch.setattr(Draft, "num_live_per_request", property(lambda draft: draft.num_nodes_per_request))


def what_hangs_from_a_dead_node_is_live(patch: Patch) -> None:
    of = TreeLayout.of

    def by_its_own_parent(draft: Draft) -> Any:
        return evolve(of(draft), is_alive=draft.parents.numpy() != DEAD)

    patch.setattr(TreeLayout, "of", by_its_own_parent)


def dead_nodes_are_children_of_the_root(patch: Patch) -> None:
    patch.setattr(contract, "DEAD", -3)


@pytest.mark.parametrize(
    ("mutation", "shape"),
    [
        (length_is_the_number_of_nodes, CHAINS["a dead tail"]),
        (length_is_the_number_of_nodes, CHAINS["all dead"]),
        (what_hangs_from_a_dead_node_is_live, CHAINS["a tail that hangs from a dead node"]),
    ],
)
def test_block_notices(mutation: Callable[[Patch], None], shape: Shape, monkeypatch: Patch) -> None:
    assert worst_error(BlockVerifier(), shape) < 1e-12
    mutation(monkeypatch)
    assert worst_error(BlockVerifier(), shape) > 1e-2


def test_block_notices_in_a_batch(monkeypatch: Patch) -> None:
    length_is_the_number_of_nodes(monkeypatch)
    assert joint_error(BlockVerifier(), [models(2, 0), models(2, 1)], PAIRS["a dead tail beside a chain"]) > 1e-4


@pytest.mark.parametrize("rule", [ChosenVerifier, RejectionVerifier, TraversalVerifier])
def test_a_dead_node_that_is_tried_is_noticed(rule: Any, monkeypatch: Patch) -> None:
    dead_nodes_are_children_of_the_root(monkeypatch)
    assert worst_error(rule(), TREES["dead leaves"], vocab=2) > 1e-3


# What else is computed of a chain with dead nodes


def with_tail(chains: list[list[int]], lengths: list[int]) -> Draft:
    """Return a batch of chains. Chain i is followed by dead (padding) nodes, so that it has lengths[i] nodes."""
    trees = [
        DraftTree(chain + [0] * (n - len(chain)), [i - 1 if i < len(chain) else DEAD for i in range(n)])
        for chain, n in zip(chains, lengths, strict=True)
    ]
    return evolve(Draft.from_trees(trees), is_chain=True)


def test_the_layout_of_a_chain_is_that_of_the_same_tree() -> None:
    chain = with_tail([[5, 6], [], [7]], [4, 2, 1])
    assert chain.num_live_per_request == [2, 0, 1]
    assert chain.num_nodes_per_request == [4, 2, 1]
    layout = chain.host_layout
    assert layout.row_depths.tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 0, 1]
    assert layout.up.tolist() == [0, 0, 1, 3, 4, 5, 6, 7, 8, 8]
    assert layout.is_alive.tolist() == [True, True, False, False, False, False, True]
    tree = evolve(chain, is_chain=False).host_layout
    for name in ("row_requests", "row_depths", "up", "root_rows", "node_rows", "parent_rows", "is_alive"):
        assert np.array_equal(getattr(layout, name), getattr(tree, name)), name


def test_dead_nodes_have_no_history() -> None:
    chain = with_tail([[5, 6]], [4])
    assert Paths(chain).token_ids.tolist() == [[-1, -1], [5, -1], [6, 5], [-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    "rule", [GreedyVerifier(), ChosenVerifier(), BlockVerifier(), TypicalVerifier(TypicalConfig())]
)
def test_a_dead_tail_changes_no_token(rule: Any) -> None:
    """With the same noise, a verifier emits the same tokens whether or not dead (padding) nodes follow the draft."""
    chains, lengths = [[1, 2, 0], [], [2]], [5, 2, 1]
    short, long = Draft.from_chains(chains), with_tail(chains, lengths)
    num_accepted = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.full((long.num_nodes + 3, 3), torch.nan)
        logits[[0, 1, 2, 3, 6, 9, 10]] = own = 2 * torch.randn(short.num_nodes + 3, 3, generator=generator)
        logits = logits.nan_to_num(seed % 7)
        noise = CounterRandom([seed, seed + 1, seed + 2], torch.tensor([5, 6, 7]))
        expected, found = rule.verify(own, short, noise), rule.verify(logits, long, noise)
        width = short.max_depth + 1
        assert torch.equal(found.token_ids[:, :width], expected.token_ids)
        assert bool((found.token_ids[:, width:] == -1).all())
        assert torch.equal(found.num_accepted, expected.num_accepted)
        assert torch.equal((found.rows - found.rows[:, :1])[:, :width], expected.rows - expected.rows[:, :1])
        num_accepted += int(found.num_accepted.sum())
    assert num_accepted > 20
