"""Finds sampled draft tokens that were drawn with noise which is not the proposer's own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from specdec_core.contracts.verifier import Stream
from specdec_core.sampling.random import CounterRandom


class SampledNode(NamedTuple):
    """A sampled draft token.

    seed, root_position: of its request. number: the node's index in its tree. depth: of its parent (root: 0).
    weights: float64 [n], what it was drawn from, in the order of the row's columns.
    column: the column that was drawn.
    """

    seed: int
    root_position: int
    number: int
    depth: int
    weights: torch.Tensor
    column: int


def draws_with_others_noise(node: SampledNode) -> Mapping[str, int]:
    """Return which column the noise of others would draw for a node, by the noise's name."""
    random = CounterRandom([node.seed], torch.tensor([node.root_position]))
    weights, request = node.weights.unsqueeze(0), torch.zeros(1, dtype=torch.int64)
    found = {"the target's own token at its place": random.target_token(weights, request, request + node.depth)}
    for stream in (Stream.TARGET, Stream.ACCEPT, Stream.RECOVER):
        found[f"Stream.{stream.name}"] = random.categorical(weights, stream, request, request + node.number)
    return {name: int(column) for name, column in found.items()}


def coupled(nodes: Sequence[SampledNode]) -> Iterator[tuple[str, int, float]]:
    """Yield for each noise and each index of a node: the noise's name, the index, and by how many standard deviations
    more often than by chance the drawn tokens agree with those that this noise would draw."""
    surplus: dict[tuple[str, int], float] = defaultdict(float)
    variance: dict[tuple[str, int], float] = defaultdict(float)
    for node in nodes:
        probs = node.weights / node.weights.sum()
        by_chance = float((probs**2).sum())
        for name, column in draws_with_others_noise(node).items():
            surplus[name, node.number] += float(column == node.column) - by_chance
            variance[name, node.number] += by_chance * (1 - by_chance)
    for (name, index), total in surplus.items():
        yield name, index, total / math.sqrt(max(variance[name, index], 1e-9))
