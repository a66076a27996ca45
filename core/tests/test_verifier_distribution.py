"""ChosenVerifier (for deterministic drafts): over all random draws, the output has the target's distribution."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from enumerating import enumerate_outcomes

from specdec_core.contracts.draft import Draft, DraftTree
from specdec_core.contracts.verifier import RandomSource, Verdict

Target = dict[tuple[int, ...], np.ndarray]
"""History -> the next token's distribution."""

TREES = {
    "no draft": ([], []),
    "chain": ([0, 1, 1], [-1, 0, 1]),
    "siblings": ([0, 1, 1, 0], [-1, -1, 0, 1]),
    "duplicate siblings": ([1, 1, 0, 1], [-1, -1, 0, 1]),
    "dead nodes": ([1, 0, 1, 1], [-2, -1, 0, 1]),
    "three levels": ([0, 1, 0, 1, 0, 1, 1], [-1, -1, 0, 0, 1, 2, 3]),
}


def random_target(vocab: int, length: int, seed: int) -> Target:
    """Return random next-token distributions after every sequence of fewer than `length` tokens. Some tokens are
    impossible, some nearly certain."""
    rng = np.random.default_rng(seed)
    target = {}
    for n in range(length):
        for history in product(range(vocab), repeat=n):
            weights = rng.random(vocab) ** 3 * (rng.random(vocab) < 0.9)
            weights[rng.integers(vocab)] += 0.05
            target[history] = weights / weights.sum()
    return target


def target_logits(target: Target, tree: DraftTree) -> torch.Tensor:
    """Return the target's logits after the root and after every draft node: float64 [num_nodes + 1, vocab].

    Rows of dead (padding) nodes are arbitrary.
    """
    histories: list[tuple[int, ...]] = []
    for token, parent in zip(*tree, strict=True):
        histories.append((*(histories[parent] if parent >= 0 else ()), token))
    rows = np.stack([target[history] for history in [(), *histories]])
    return torch.tensor(np.log(np.maximum(rows, 1e-300))).masked_fill(torch.tensor(rows == 0), -torch.inf)


def sequence_probability(target: Target, sequence: tuple[int, ...], start: int = 0) -> float:
    return float(np.prod([target[sequence[:i]][sequence[i]] for i in range(start, len(sequence))]))


def largest_error(verifier: Any, target: Target, tree: DraftTree, vocab: int) -> float:
    """Return the largest difference between an output sequence's exact probability and its probability under the
    target.

    Each sequence has depth + 1 tokens. If the verifier emits fewer, the rest is sampled from the target.
    """
    draft = Draft.from_trees([tree])
    logits = target_logits(target, tree)
    length = draft.max_depth + 1
    emitted: dict[tuple[int, ...], float] = {}

    def step(random: RandomSource) -> tuple[int, ...]:
        verdict: Verdict = verifier.verify(logits, draft, random)
        return tuple(verdict.token_ids[0, : int(verdict.num_accepted[0]) + 1].tolist())

    for probability, tokens in enumerate_outcomes(step):
        emitted[tokens] = emitted.get(tokens, 0.0) + probability
    assert abs(sum(emitted.values()) - 1) < 1e-12
    errors = []
    for sequence in product(range(vocab), repeat=length):
        actual = sum(
            p * sequence_probability(target, sequence, len(tokens))
            for tokens, p in emitted.items()
            if sequence[: len(tokens)] == tokens
        )
        errors.append(abs(actual - sequence_probability(target, sequence)))
    return max(errors)


def chosen() -> Any:
    from specdec_core.verifiers.chosen import ChosenVerifier

    return ChosenVerifier()


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_chosen_verifier_is_lossless(vocab: int, tree: tuple[list[int], list[int]]) -> None:
    for seed in range(3):
        target = random_target(vocab, 4, seed)
        assert largest_error(chosen(), target, DraftTree(*tree), vocab) < 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_chosen_verifier_is_lossless_on_random_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 5))
    depths: list[int] = []
    parents: list[int] = []
    for _ in range(int(rng.integers(1, 8))):
        allowed = [-2, -1, *(i for i, depth in enumerate(depths) if depth < 3)]
        parents.append(int(rng.choice(allowed)))
        depths.append(depths[parents[-1]] + 1 if parents[-1] >= 0 else 1)
    tree = DraftTree(rng.integers(vocab, size=len(parents)).tolist(), parents)
    assert largest_error(chosen(), random_target(vocab, 4, seed + 100), tree, vocab) < 1e-12


# The check notices verifiers that are nearly right


class Walker:
    """A verifier that walks down the draft tree from the root.

    Its method `step` returns the token to emit at a node, and the index of the child to go to, or None to stop.
    """

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        tree, node, tokens, rows = draft.tree(0), -1, [], []
        while True:
            rows.append(node + 1)
            probs = logits[node + 1].softmax(-1)

            def draw(probs: torch.Tensor = probs, depth: int = len(tokens)) -> int:
                requests = torch.zeros(1, dtype=torch.int64)
                return int(random.target_token(probs[None], requests, torch.tensor([self.noise_depth(depth)])))

            children = [i for i, parent in enumerate(tree.parents) if parent == node]
            token, child = self.step(probs, children, tree.token_ids, draw)
            tokens.append(token)
            if child is None:
                break
            node = child
        padding = draft.max_depth + 1 - len(tokens)
        return Verdict(
            torch.tensor([tokens + [-1] * padding]),
            torch.tensor([rows + rows[-1:] * padding], dtype=torch.int32),
            torch.tensor([len(tokens) - 1], dtype=torch.int32),
        )

    def noise_depth(self, depth: int) -> int:
        return depth

    def step(
        self, probs: torch.Tensor, children: list[int], token_ids: list[int], draw: Callable[[], int]
    ) -> tuple[int, int | None]:
        token = draw()
        return token, next((child for child in children if token_ids[child] == token), None)


class ReusesTheRootsDraw(Walker):
    def noise_depth(self, depth: int) -> int:
        return 0


class FollowsAChildWithoutDrawing(Walker):
    """A verifier with a deliberate bug: without a random draw, it accepts any child whose token has a probability above
    0.05."""

    def step(self, probs, children, token_ids, draw):  # type: ignore[no-untyped-def]
        for child in children:
            if probs[token_ids[child]] > 0.05:
                return token_ids[child], child
        return super().step(probs, children, token_ids, draw)


class AcceptsWhatIsLikely(Walker):
    def step(self, probs, children, token_ids, draw):  # type: ignore[no-untyped-def]
        for child in children:
            if probs[token_ids[child]] > 0.5:
                return token_ids[child], child
        return super().step(probs, children, token_ids, draw)


class TakesTheLikeliestAfterARefusal(Walker):
    def step(self, probs, children, token_ids, draw):  # type: ignore[no-untyped-def]
        token, child = super().step(probs, children, token_ids, draw)
        if child is None and children:
            token = int(probs.argmax())
        return token, child


def worst_error(verifier: Any) -> float:
    return max(
        largest_error(verifier, random_target(3, 4, seed), DraftTree(*tree), 3)
        for seed in range(3)
        for tree in TREES.values()
    )


def test_the_check_passes_a_plain_walk() -> None:
    assert worst_error(Walker()) < 1e-12


@pytest.mark.parametrize(
    "biased", [ReusesTheRootsDraw, FollowsAChildWithoutDrawing, AcceptsWhatIsLikely, TakesTheLikeliestAfterARefusal]
)
def test_the_check_notices_bias(biased: type[Walker]) -> None:
    assert worst_error(biased()) > 1e-3
