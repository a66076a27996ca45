"""ChosenVerifier and GreedyVerifier compared with a naive verifier that walks down the draft tree."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from naive_verifier import SmallestHash, assert_verdict, cases, draft_of, draft_trees

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource


def chosen() -> Any:
    from specdec_core.verifiers.chosen import ChosenVerifier

    return ChosenVerifier()


def greedy() -> Any:
    from specdec_core.verifiers.greedy import GreedyVerifier

    return GreedyVerifier()


class NoChance:
    """A random source that raises if it is used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was drawn, which greedy verification has no use for")


def counter_random(seeds: list[int], positions: list[int]) -> RandomSource:
    from specdec_core.sampling.random import CounterRandom

    return CounterRandom(seeds, torch.tensor(positions))


def largest(row: torch.Tensor, request: int, depth: int) -> int:
    return int(row.argmax())


@settings(max_examples=400, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_chosen_equals_the_naive_walk(case: tuple[torch.Tensor, Draft], seed: int) -> None:
    logits, draft = case
    random = SmallestHash(draft.batch_size, draft.max_depth, logits.shape[1], seed)
    before = logits.clone()
    assert_verdict(chosen().verify(logits, draft, random), logits, draft, random.draw)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "verify changed the logits"


@settings(max_examples=400, deadline=None)
@given(case=cases())
def test_greedy_equals_the_naive_walk(case: tuple[torch.Tensor, Draft]) -> None:
    logits, draft = case
    assert_verdict(greedy().verify(logits, draft, NoChance()), logits, draft, largest)


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_chosen_equals_greedy_on_one_hot_logits(case: tuple[torch.Tensor, Draft]) -> None:
    logits, draft = case
    logits = torch.full_like(logits, -math.inf).scatter(1, logits.nan_to_num(-9.0, 9.0).argmax(-1, True), 0.0)
    random = SmallestHash(draft.batch_size, draft.max_depth, logits.shape[1], 0)
    first, second = chosen().verify(logits, draft, random), greedy().verify(logits, draft, NoChance())
    for field in ("token_ids", "rows", "num_accepted"):
        assert torch.equal(getattr(first, field), getattr(second, field)), field


def test_chosen_with_the_shipped_source_equals_the_naive_walk() -> None:
    """ChosenVerifier with the engine's CounterRandom equals the naive verifier on larger trees and batches."""
    rng = np.random.default_rng(0)
    vocab, num_accepted = 3, 0
    for _ in range(40):
        trees = []
        for _ in range(int(rng.integers(1, 9))):
            num_nodes = int(rng.integers(0, 25))
            parents = [int(rng.integers(max(-2, i - 6), i)) for i in range(num_nodes)]
            trees.append((rng.integers(vocab, size=num_nodes).tolist(), parents))
        draft = draft_of(trees)
        logits = torch.tensor(rng.normal(size=(draft.num_nodes + draft.batch_size, vocab)), dtype=torch.float32)
        seeds = rng.integers(2**63 - 1, size=draft.batch_size).tolist()
        positions = rng.integers(5000, size=draft.batch_size).tolist()
        random = counter_random(seeds, positions)

        def draw(row: torch.Tensor, request: int, depth: int) -> int:
            alone = counter_random([seeds[request]], [positions[request] + depth])  # noqa: B023
            return int(alone.target_token(row.softmax(-1)[None], torch.tensor([0]), torch.tensor([0])))

        verdict = chosen().verify(logits, draft, random)
        assert_verdict(verdict, logits, draft, draw)
        num_accepted += int(verdict.num_accepted.sum())
    assert num_accepted > 80


@settings(max_examples=50, deadline=None)
@given(trees=st.lists(draft_trees(4), min_size=2, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_a_request_is_verified_alone_as_in_a_batch(trees: list, seed: int) -> None:
    draft = Draft.from_trees(trees)
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=(draft.num_nodes + draft.batch_size, 4)), dtype=torch.float32)
    seeds, positions = list(range(len(trees))), [3 * b for b in range(len(trees))]
    whole = chosen().verify(logits, draft, counter_random(seeds, positions))
    for b, tree in enumerate(trees):
        own = Draft.from_trees([tree])
        first_row, last_row = draft.offsets[b] + b, draft.offsets[b + 1] + b + 1
        alone = chosen().verify(logits[first_row:last_row], own, counter_random([b], [3 * b]))
        length = int(alone.num_accepted) + 1
        assert alone.token_ids[0, :length].tolist() == whole.token_ids[b, :length].tolist()
        assert int(alone.num_accepted) == int(whole.num_accepted[b])


def test_q_is_ignored() -> None:
    draft = draft_of([([1, 0, 2], [-1, -1, 0]), ([2], [-1])])
    sampled = attrs.evolve(draft, q=torch.rand(2, 3), q_rows=torch.tensor([0, 0, 1, -1], dtype=torch.int32))
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    for seed in range(50):
        random = SmallestHash(2, draft.max_depth, 3, seed)
        plain, with_q = chosen().verify(logits, draft, random), chosen().verify(logits, sampled, random)
        assert torch.equal(plain.token_ids, with_q.token_ids)
        assert torch.equal(plain.rows, with_q.rows)


@pytest.mark.parametrize("verifier", [chosen, greedy])
def test_the_first_of_duplicate_siblings_wins(verifier: Any) -> None:
    """Of two siblings with the same token the first is accepted, even if only the second has a child that would be
    accepted too."""
    draft = draft_of([([1, 1, 2], [-1, -1, 1])])
    logits = torch.full((4, 3), -math.inf)
    logits[0, 1] = logits[1, 2] = logits[2, 2] = logits[3, 0] = 0.0
    verdict = verifier().verify(logits, draft, SmallestHash(1, 2, 3, 0))
    assert verdict.token_ids.tolist() == [[1, 2, -1]]
    assert verdict.rows.tolist() == [[0, 1, 1]]
    assert verdict.num_accepted.tolist() == [1]


@pytest.mark.parametrize("verifier", [chosen, greedy])
def test_nothing_below_a_dead_node_is_accepted(verifier: Any) -> None:
    draft = draft_of([([1, 1, 1], [-2, 0, 1])])
    logits = torch.full((4, 2), -math.inf)
    logits[:, 1] = 0.0
    verdict = verifier().verify(logits, draft, SmallestHash(1, 3, 2, 0))
    assert verdict.token_ids.tolist() == [[1, -1, -1, -1]]
    assert verdict.num_accepted.tolist() == [0]


@pytest.mark.parametrize("verifier", [chosen, greedy])
def test_a_chain_marked_as_chain_is_verified_like_the_same_tree(verifier: Any) -> None:
    chains = [[1, 2, 3], [], [0], [3, 3, 3, 3]]
    as_chain, as_tree = Draft.from_chains(chains), draft_of([(c, list(range(-1, len(c) - 1))) for c in chains])
    for seed in range(50):
        logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(seed))
        for row, token in ((0, 1), (1, 2), (5, 0), (7, 3), (8, 3)):
            logits[row, token] += 3
        verdicts = [verifier().verify(logits, d, SmallestHash(4, 4, 4, seed)) for d in (as_chain, as_tree)]
        assert torch.equal(verdicts[0].token_ids, verdicts[1].token_ids)
        assert torch.equal(verdicts[0].rows, verdicts[1].rows)
