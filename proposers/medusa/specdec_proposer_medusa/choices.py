"""The shape of Medusa's draft trees: built from how often each head is right."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import prod

Accuracies = Sequence[Sequence[float]]

VICUNA_7B: Accuracies = (
    (0.560, 0.111, 0.055, 0.033, 0.020),
    (0.316, 0.107, 0.062, 0.043, 0.034),
    (0.201, 0.087, 0.060, 0.036, 0.033),
    (0.147, 0.078, 0.049, 0.037, 0.029),
    (0.118, 0.069, 0.048, 0.038, 0.028),
)
"""Share of tokens that the heads of medusa-vicuna-7b-v1.3 guess right with their first five ranks: differences of the
cumulative ones in FasterDecoding/Medusa, assets/medusa_acc.csv. They are used for heads of which nothing is known."""


def choices_from_accuracies(accuracies: Accuracies, num_nodes: int) -> list[tuple[int, ...]]:
    """Build the tree that is expected to get the most draft tokens accepted (Cai et al. 2024; the authors'
    gen_results.py).

    The tree begins with the likeliest token of the first head. Then nodes are added one at a time: of the next siblings
    and first children of all nodes in the tree, the one that is most likely to be right. The probability that a node is
    right is taken as the product of the accuracies along its path.

    accuracies: for each head, the share of tokens that its likeliest guess, its second likeliest, ... gets right.

    Returns the nodes in the order in which they were added, each as its path: the rank of the token of each head. There
    are fewer than num_nodes if all other nodes have probability 0.
    """

    def offer(path: tuple[int, ...], order: tuple[int, int]) -> None:
        if len(path) <= len(accuracies) and path[-1] < len(accuracies[len(path) - 1]):
            gain = prod(float(accuracies[head][rank]) for head, rank in enumerate(path))
            if gain > 0 or path == (0,):
                heappush(offered, (-gain, order, path))

    kept: list[tuple[int, ...]] = []
    offered: list[tuple[float, tuple[int, int], tuple[int, ...]]] = []
    offer((0,), (0, 0))
    while offered and len(kept) < num_nodes:
        *_, path = heappop(offered)
        kept.append(path)
        offer((*path[:-1], path[-1] + 1), (len(kept), 0))  # of equal gains, that of the earlier node counts
        offer((*path, 0), (len(kept), 1))
    return kept
