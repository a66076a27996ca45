"""Samples drafts from small random models, verifies them, and computes the exact output distribution over all random
draws."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.contracts.draft import DEAD, Draft, DraftTree
from specdec_core.contracts.verifier import RandomSource, Stream, Verifier
from specdec_testing.enumerating import enumerate_outcomes

History = tuple[int, ...]
Model = dict[History, np.ndarray]
"""History -> the next token's distribution."""

SAMPLED = None


@frozen
class Shape:
    """The shape of a draft tree, and how its tokens are picked.

    parents: index of each node's parent; -1 for the root, DEAD for padding.
    tokens: for each node a fixed token id, or SAMPLED if its token is drawn from the draft model.
    with_replacement: whether siblings are drawn with replacement.
    is_chain: whether the draft is marked as a chain.
    """

    parents: tuple[int, ...]
    tokens: tuple[int | None, ...]
    with_replacement: bool = True
    is_chain: bool = False

    @property
    def depth(self) -> int:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


def random_model(vocab: int, length: int, seed: int, impossible: float = 0.15) -> Model:
    """Return a random model: the next-token distribution after every sequence of fewer than `length` tokens.

    Some tokens are nearly certain. impossible: the share of tokens that get probability 0.
    """
    rng = np.random.default_rng(seed)
    model = {}
    for n in range(length):
        for history in product(range(vocab), repeat=n):
            weights = rng.random(vocab) ** 3 * (rng.random(vocab) >= impossible)
            weights[rng.integers(vocab)] += 0.05
            model[history] = weights / weights.sum()
    return model


def histories(tokens: list[int], parents: tuple[int, ...]) -> list[History]:
    """Return the path of each of the first len(tokens) nodes: the tokens from the root's child down to the node."""
    found: list[History] = []
    for token, parent in zip(tokens, parents, strict=False):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def draw(shape: Shape, q: Model, random: RandomSource) -> Draft:
    """Draft one request, as a proposer would.

    Nodes with a fixed token in `shape` get that token. The tokens of the others are drawn from the draft model `q`, in
    the order of the nodes.
    """
    tokens: list[int] = []
    rows: dict[int, np.ndarray] = {}  # of each parent with sampled children
    weights: dict[int, np.ndarray] = {}  # of the tokens that its next child may be
    for node, (parent, token) in enumerate(zip(shape.parents, shape.tokens, strict=True)):
        if token is SAMPLED:
            rows.setdefault(parent, q[histories(tokens, shape.parents)[parent] if parent >= 0 else ()])
            left = weights.setdefault(parent, rows[parent].copy())
            # If no token is left, a proposer draws no more siblings; here the last one is repeated.
            token = _drawn(left if left.sum() > 0 else rows[parent], node, random)
            if not shape.with_replacement:
                left[token] = 0
        tokens.append(token)
    q_rows = [
        list(rows).index(p) if kind is SAMPLED else -1 for p, kind in zip(shape.parents, shape.tokens, strict=True)
    ]
    return evolve(
        Draft.from_trees([DraftTree(tokens, list(shape.parents))]),
        q=torch.tensor(np.array(list(rows.values()))).reshape(-1, len(q[()])),
        q_rows=torch.tensor(q_rows, dtype=torch.int32),
        with_replacement=shape.with_replacement,
        is_chain=shape.is_chain,
    )


def _drawn(weights: np.ndarray, node: int, random: RandomSource) -> int:
    requests = torch.zeros(1, dtype=torch.int64)
    return int(random.categorical(torch.tensor(weights)[None], Stream.DRAFT, requests, requests + node))


def target_logits(target: Model, draft: Draft) -> torch.Tensor:
    """Return the target's logits after the root and after every draft node: float64 [num_nodes + 1, vocab].

    Rows of dead (padding) nodes are wrong on purpose, so that a verifier that uses them fails.
    """
    tokens, parents = draft.tree(0)
    rows = np.stack([target[history] for history in [(), *histories(tokens, tuple(parents))]])
    is_dead = [False]
    for parent in parents:
        is_dead.append(parent == DEAD or is_dead[parent + 1])
    rows[is_dead] = np.roll(rows[is_dead], 1, axis=1)
    return torch.tensor(np.log(np.maximum(rows, 1e-300))).masked_fill(torch.tensor(rows == 0), -torch.inf)


Draw = Callable[[Shape, Model, RandomSource], Draft]
"""How a draft of a shape is drawn from a draft model: `draw`, or what a test puts in its place."""


@frozen
class Emitted:
    """The error and the acceptance of a verifier, computed exactly over all random draws of drafting and verification.

    error: the largest difference between an output sequence's probability and its probability under the target. Each
        sequence has depth + 1 tokens. If the verifier emits fewer, the rest is sampled from the target.
    num_accepted: the expected number of accepted draft tokens.
    worst: the sequence with the largest error.
    actual, expected: the probability of that sequence, and the one that it has under the target.
    """

    error: float
    num_accepted: float
    worst: History
    actual: float
    expected: float


def outcomes(verifier: Verifier, target: Model, q: Model, shape: Shape, draw: Draw = draw) -> dict[History, float]:
    """Return {tokens that a verifier emits: probability} over all random draws of drafting and verification."""
    emitted: dict[History, float] = {}

    def step(random: RandomSource) -> History:
        draft = draw(shape, q, random)
        verdict = verifier.verify(target_logits(target, draft), draft, random)
        return tuple(verdict.token_ids[0, : int(verdict.num_accepted[0]) + 1].tolist())

    for probability, tokens in enumerate_outcomes(step):
        emitted[tokens] = emitted.get(tokens, 0.0) + probability
    assert abs(sum(emitted.values()) - 1) < 1e-12
    return emitted


def emit(verifier: Verifier, target: Model, q: Model, shape: Shape, draw: Draw = draw) -> Emitted:
    emitted = outcomes(verifier, target, q, shape, draw)
    found = []
    for sequence in product(range(len(q[()])), repeat=shape.depth + 1):
        expected = sequence_probability(target, sequence, 0)
        actual = sum(
            p * sequence_probability(target, sequence, len(tokens))
            for tokens, p in emitted.items()
            if sequence[: len(tokens)] == tokens
        )
        found.append((abs(actual - expected), sequence, actual, expected))
    num_accepted = sum(p * (len(tokens) - 1) for tokens, p in emitted.items())
    error, worst, actual, expected = max(found)
    return Emitted(error, num_accepted, worst, actual, expected)


def sequence_probability(target: Model, sequence: History, start: int) -> float:
    return float(np.prod([target[sequence[:i]][sequence[i]] for i in range(start, len(sequence))]))
