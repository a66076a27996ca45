"""Reference implementation of EAGLE-2's dynamic draft tree (Li et al. 2406.16858, section 4).

Nodes are generated level by level. First come the root's children. For each later level, only the best nodes of the
level above are expanded; these nodes are called the frontier. The frontier's nodes are expanded in the order of their
scores, best first, and the children of a node are generated in the order of their probabilities, likeliest first. A
node's index is its number in this order.

Ties: of a node's children with equal probabilities, the one that comes first in the draft vocabulary wins. Of generated
nodes with equal scores, the one with the lower index wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from attrs import frozen
from torch import Tensor

LogProbs = Tensor | Sequence[float] | Mapping[int, float]  # by token id of the target's vocabulary


class DynamicTree(NamedTuple):
    token_ids: list[int]
    parents: list[int]  # -1 the root, else the index of an earlier node
    depths: list[int]  # the root's children have 1
    scores: list[float]  # log-probability of the path from the root, this node included


@frozen
class _Candidate:
    path: tuple[int, ...]  # the tokens below the root, its own last
    parent: int  # number of the parent node; -1 the root
    score: float


def dynamic_tree(
    next_log_probs: Callable[[tuple[int, ...]], LogProbs], top_k: int, depth: int, num_nodes: int
) -> DynamicTree:
    """Return the best `num_nodes` of all generated nodes, in the order of their indices, or all nodes if there are
    fewer.

    Args:
        next_log_probs: a function that takes the path of token ids from the root's child to a node, () for the root
            itself, and returns the draft head's log-probabilities of the next token.
        top_k: number of children of an expanded node, and number of expanded nodes of a level; all if there are fewer.
        depth: number of levels that are expanded below the root, as the method's authors count. The deepest nodes are
            at depth + 1. With 0 there are only the root's children.
        num_nodes: number of nodes without the root (the authors' total_token includes it).
    """
    candidates = _children(next_log_probs, (), -1, 0.0, top_k)
    level = list(range(len(candidates)))
    for _ in range(depth):
        frontier = _best(level, candidates, top_k)
        first = len(candidates)
        for number in frontier:
            node = candidates[number]
            candidates += _children(next_log_probs, node.path, number, node.score, top_k)
        level = list(range(first, len(candidates)))
    kept = sorted(_best(range(len(candidates)), candidates, num_nodes))
    # A parent scores no less than its children and has a lower number, so it is kept if one of them is.
    index = {-1: -1} | {number: i for i, number in enumerate(kept)}
    nodes = [candidates[number] for number in kept]
    return DynamicTree(
        [node.path[-1] for node in nodes],
        [index[node.parent] for node in nodes],
        [len(node.path) for node in nodes],
        [node.score for node in nodes],
    )


def _children(
    next_log_probs: Callable[[tuple[int, ...]], LogProbs],
    path: tuple[int, ...],
    parent: int,
    parent_score: float,
    top_k: int,
) -> list[_Candidate]:
    log_probs = next_log_probs(path)
    entries = log_probs.items() if isinstance(log_probs, Mapping) else enumerate(map(float, log_probs))
    ranked = sorted(entries, key=lambda entry: -entry[1])  # stable: equal values stay in their order
    return [_Candidate((*path, token), parent, parent_score + log_prob) for token, log_prob in ranked[:top_k]]


def _best(numbers: Sequence[int], candidates: Sequence[_Candidate], count: int) -> list[int]:
    return sorted(numbers, key=lambda number: -candidates[number].score)[:count]
