"""The shapes of the draft trees in probe_draft.py, determined by a request's seed and the root's position."""

from __future__ import annotations

import numpy as np
from attrs import frozen

MOST_NODES, MOST_DEPTH = 12, 5


def shape_of(seed: int, root_position: int) -> list[int]:
    """Return the parents of a random tree's nodes (-1: the root), level by level, siblings side by side.

    One tree in ten is empty.
    """
    rng = np.random.default_rng([seed % 2**64, root_position])
    num_nodes = 0 if rng.random() < 0.1 else int(rng.integers(1, MOST_NODES + 1))
    parents: list[int] = []
    level = [-1]
    for _ in range(MOST_DEPTH):
        width = min(num_nodes - len(parents), int(rng.integers(1, 4)))
        below = sorted(rng.choice(level, size=width).tolist())
        level = list(range(len(parents), len(parents) + width))
        parents += below
        if not level:
            break
    return parents


@frozen(eq=False)
class Level:
    """The nodes (draft tokens) at one depth of all draft trees in a batch, tree by tree. All arrays except `ancestors`
    are int64 [n]."""

    requests: np.ndarray  # index in the batch
    nodes: np.ndarray  # index in the request's tree
    parents: np.ndarray
    ranks: np.ndarray  # among siblings
    sets: np.ndarray  # which set of siblings, counted from 0 in this level
    ancestors: np.ndarray  # [n, depth]   the node itself, its parent, and so on

    @property
    def is_first_of_set(self) -> np.ndarray:
        return self.ranks == 0


def levels_of(trees: list[list[int]]) -> list[Level]:
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(MOST_DEPTH)]
    paths: list[list[list[int]]] = [[] for _ in range(MOST_DEPTH)]
    for request, parents in enumerate(trees):
        up: list[list[int]] = []
        for node, parent in enumerate(parents):
            up.append([node] if parent < 0 else [node, *up[parent]])
            depth = len(up[-1])
            rank = parents[:node].count(parent)
            rows[depth - 1].append((request, node, parent, rank))
            paths[depth - 1].append(up[-1])
    levels = []
    for level, ancestors in zip(rows, paths, strict=True):
        if level:
            requests, nodes, parents, ranks = np.array(level).T
            levels.append(Level(requests, nodes, parents, ranks, np.cumsum(ranks == 0) - 1, np.array(ancestors)))
    return levels
