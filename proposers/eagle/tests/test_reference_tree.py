"""Tests of the reference implementation of dynamic trees: on examples worked out by hand, and by properties that hold
for random examples."""

from __future__ import annotations

from itertools import product
from math import log

from hypothesis import given, strategies as st
from reference_tree import dynamic_tree

VOCAB_SIZE = 3


def table(seed: list[int], depth: int) -> dict[tuple[int, ...], list[float]]:
    """Return the log-probabilities of the next token for every path of up to `depth` tokens. The numbers in `seed`
    determine the log-probabilities. Many log-probabilities are equal, so that ties are common."""
    result = {}
    for i, path in enumerate(path for length in range(depth + 1) for path in product(range(VOCAB_SIZE), repeat=length)):
        shares = [1 + (seed[(VOCAB_SIZE * i + j) % len(seed)]) for j in range(VOCAB_SIZE)]
        result[path] = [log(share / sum(shares)) for share in shares]
    return result


seeds = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def test_by_hand() -> None:
    probs = {(): [0.5, 0.3, 0.2], (0,): [0.1, 0.1, 0.8], (1,): [0.9, 0.1, 0.0001], (0, 2): [0.4, 0.6, 0.0001]}
    after = {path: [log(p) for p in ps] for path, ps in probs.items()} | {(1, 0): [log(0.5)] * 3}
    tree = dynamic_tree(after.__getitem__, top_k=2, depth=2, num_nodes=6)
    # Nodes: 0 0.5, 1 0.3 | of 0: 2 (token 2) 0.4, 3 (token 0) 0.05, of 1: 4 (token 0) 0.27, 5 (token 1) 0.03 |
    # of 2: 6 (token 1) 0.24, 7 (token 0) 0.16, of 4: 8 (token 0) 0.135, 9 (token 1) 0.135
    assert tree.token_ids == [0, 1, 2, 0, 1, 0]
    assert tree.parents == [-1, -1, 0, 1, 2, 2]
    assert tree.depths == [1, 1, 2, 2, 3, 3]
    assert [round(score, 9) for score in tree.scores] == [round(log(p), 9) for p in (0.5, 0.3, 0.4, 0.27, 0.24, 0.16)]


def test_the_frontier_goes_on_in_the_order_of_its_scores() -> None:
    after = {(): {7: log(0.6), 8: log(0.4)}, (7,): {1: log(0.5), 2: log(0.5)}, (8,): {3: log(1.0)}}
    after |= {(8, 3): {4: 0.0}, (7, 1): {5: 0.0}}
    tree = dynamic_tree(after.__getitem__, top_k=2, depth=2, num_nodes=99)
    assert tree.token_ids == [7, 8, 1, 2, 3, 4, 5], "4 before 5: its parent scores 0.4, that of 5 0.3"
    assert tree.parents == [-1, -1, 0, 0, 1, 4, 2]


def test_equal_values_go_to_the_first() -> None:
    tree = dynamic_tree(lambda path: [log(0.25)] * 4, top_k=2, depth=1, num_nodes=4)
    assert tree[:2] == ([0, 1, 0, 1], [-1, -1, 0, 0])
    sure = dynamic_tree(lambda path: [0.0], top_k=3, depth=4, num_nodes=3)
    assert sure[:3] == ([0, 0, 0], [-1, 0, 1], [1, 2, 3])
    in_given_order = dynamic_tree(lambda path: {9: log(0.5), 2: log(0.5)}, top_k=1, depth=0, num_nodes=1)
    assert in_given_order.token_ids == [9]


@given(seeds, st.integers(1, 5), st.integers(0, 3), st.integers(0, 30))
def test_it_is_a_tree_of_the_best(seed: list[int], top_k: int, depth: int, num_nodes: int) -> None:
    after = table(seed, depth)
    tree = dynamic_tree(after.__getitem__, top_k, depth, num_nodes)
    everything = dynamic_tree(after.__getitem__, top_k, depth, 10**6)
    assert len(tree.token_ids) == min(num_nodes, len(everything.token_ids))
    assert sorted(tree.scores) == sorted(everything.scores)[len(everything.scores) - len(tree.scores) :]
    paths: list[tuple[int, ...]] = []
    for i, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        assert -1 <= parent < i
        above = () if parent == -1 else paths[parent]
        paths.append((*above, token))
        assert tree.depths[i] == len(paths[i]) <= depth + 1
        score = sum(after[paths[i][:k]][paths[i][k]] for k in range(len(paths[i])))
        assert abs(tree.scores[i] - score) < 1e-12
    assert len(set(paths)) == len(paths)


@given(seeds, st.integers(0, 2), st.integers(1, 12))
def test_a_wide_frontier_finds_the_best_of_all_paths(seed: list[int], depth: int, num_nodes: int) -> None:
    after = table(seed, depth)
    tree = dynamic_tree(after.__getitem__, VOCAB_SIZE ** (depth + 1), depth, num_nodes)
    paths = [path for length in range(1, depth + 2) for path in product(range(VOCAB_SIZE), repeat=length)]
    scores = sorted((sum(after[path[:k]][path[k]] for k in range(len(path))) for path in paths), reverse=True)
    assert all(abs(a - b) < 1e-12 for a, b in zip(sorted(tree.scores, reverse=True), scores[:num_nodes], strict=True))


@given(seeds, st.integers(0, 3))
def test_one_child_each_is_the_greedy_chain(seed: list[int], depth: int) -> None:
    after = table(seed, depth)
    tree = dynamic_tree(after.__getitem__, 1, depth, 10)
    path: tuple[int, ...] = ()
    while len(path) <= depth:
        path = (*path, after[path].index(max(after[path])))
    assert (tuple(tree.token_ids), tree.parents) == (path, list(range(-1, depth)))
