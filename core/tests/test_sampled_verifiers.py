"""Verifiers of sampled drafts, beyond the conformance kit: random trees and extreme distributions, which rule accepts
more, and that enumeration notices rules that are nearly right."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings, strategies as st

from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.contracts.verifier import RandomSource, Stream, Verdict
from specdec_core.ops.residuals import Proposals, Residuals
from specdec_core.verifiers import traversal
from specdec_core.verifiers.block import BlockVerifier
from specdec_core.verifiers.chosen import ChosenVerifier
from specdec_core.verifiers.rejection import RejectionVerifier
from specdec_core.verifiers.traversal import TraversalVerifier
from specdec_testing.conformance.shapes import CHAINS, TREES, models
from specdec_testing.drawn_batches import noise, part, random_batch
from specdec_testing.drawn_trees import SAMPLED as S, Model, Shape, draw, emit

VERIFIERS = {"rejection": RejectionVerifier, "block": BlockVerifier, "traversal": TraversalVerifier}


@pytest.mark.parametrize("rule", VERIFIERS.values(), ids=VERIFIERS.keys())
@pytest.mark.parametrize("kind", ["disjoint", "equal", "certain draft", "certain target"])
def test_extreme_distributions(rule: Any, kind: str) -> None:
    shape = Shape((-1, 0), (S, S), is_chain=True) if rule is BlockVerifier else Shape((-1, -1, 0), (S, S, S))
    target, q = models(4, 0, shape)
    for history in target:
        if kind == "equal":
            q[history] = target[history].copy()
        if kind in ("disjoint", "certain target"):
            target[history] = np.array([0.5, 0.5, 0, 0] if kind == "disjoint" else [0, 1.0, 0, 0])
        if kind in ("disjoint", "certain draft"):
            q[history] = np.array([0, 0, 0.25, 0.75] if kind == "disjoint" else [0, 1.0, 0, 0])
    emitted = emit(rule(), target, q, shape)
    assert emitted.error < 1e-12
    if kind == "equal" and rule is BlockVerifier:
        assert emitted.num_accepted == pytest.approx(shape.depth)
    if kind == "disjoint":
        assert emitted.num_accepted == 0


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Hypothesis strategy for trees of up to 4 nodes and 3 levels. Some nodes are dead (padding). Sampled siblings come
    before deterministic ones."""
    depths: list[int] = []
    parents: list[int] = []
    tokens: list[int | None] = []
    for _ in range(draw(st.integers(1, 4))):
        parent = draw(st.sampled_from([-1, *(i for i, depth in enumerate(depths) if depth < 3), DEAD]))
        follows_chosen = any(p == parent and token is not S for p, token in zip(parents, tokens, strict=True))
        parents.append(parent)
        tokens.append(draw(st.integers(0, 1)) if follows_chosen or draw(st.booleans()) else S)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    sampled = [parent for parent, token in zip(parents, tokens, strict=True) if token is S]
    most_siblings = max((sampled.count(parent) for parent in sampled), default=0)
    return Shape(tuple(parents), tuple(tokens), with_replacement=most_siblings > 2 or draw(st.booleans()))


@settings(max_examples=25, deadline=None)
@given(shape=shapes(), vocab=st.integers(2, 3), seed=st.integers(0, 2**20))
def test_lossless_on_random_trees(shape: Shape, vocab: int, seed: int) -> None:
    target, q = models(vocab, seed, shape)
    found = {rule: emit(rule(), target, q, shape) for rule in (ChosenVerifier, RejectionVerifier, TraversalVerifier)}
    assert all(each.error < 1e-12 for each in found.values())


# What accepts more


def test_block_accepts_no_less_than_rejection() -> None:
    gains = []
    for vocab, seed in [(2, 0), (2, 1), (2, 2), (2, 3), (3, 4)]:
        pair = models(vocab, seed, CHAINS["chain"])
        found = [emit(rule(), *pair, CHAINS["chain"]).num_accepted for rule in VERIFIERS.values()]
        assert found[1] == pytest.approx(found[2], abs=1e-12), "on chains traversal is block verification"
        gains.append(found[1] - found[0])
    assert min(gains) > -1e-12
    assert max(gains) > 1e-3


def test_traversal_accepts_no_less_than_rejection() -> None:
    gains = [
        emit(TraversalVerifier(), *models(2, seed, shape), shape).num_accepted
        - emit(RejectionVerifier(), *models(2, seed, shape), shape).num_accepted
        for seed, shape in product(range(2), TREES.values())
    ]
    assert min(gains) > -1e-12
    assert max(gains) > 1e-3


# The check notices rules that are nearly right


def worst_error(rule: Any, shape: Shape, vocab: int = 3, num_seeds: int = 2, **kwargs: Any) -> float:
    return max(emit(rule, *models(vocab, seed, shape), shape, **kwargs).error for seed in range(num_seeds))


class WithoutSubtraction(Residuals):
    def _rest(self, nodes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self._left[self._proposals.parent_rows[nodes]] * scale.unsqueeze(1)


class WithoutScale(Residuals):
    def _rest(self, nodes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super()._rest(nodes, torch.ones_like(scale))


class WithoutPointMass(Residuals):
    """Nothing is subtracted for a deterministic (not sampled) draft token."""

    def _drawn(self, nodes: torch.Tensor) -> torch.Tensor:
        return super()._drawn(nodes) * self._proposals.is_sampled(nodes).unsqueeze(1)


def of_another_row(logits: torch.Tensor, proposals: Proposals) -> Residuals:
    """The draft probabilities are those of another node."""
    q_rows = torch.where(proposals.q_rows < 0, -1, (proposals.q_rows + 1) % max(1, len(proposals.q)))
    return Residuals(logits, evolve(proposals, q_rows=q_rows, q=proposals.q.clamp(min=1e-6)))


def with_earlier_siblings(logits: torch.Tensor, proposals: Proposals) -> Residuals:
    return Residuals(logits, evolve(proposals, earlier=proposals.earlier[:, :0]))


FAULTS = [
    (RejectionVerifier, WithoutSubtraction, TREES["siblings"]),
    (TraversalVerifier, WithoutSubtraction, TREES["siblings"]),
    (BlockVerifier, WithoutSubtraction, CHAINS["one"]),
    (TraversalVerifier, WithoutScale, TREES["two levels"]),
    (BlockVerifier, WithoutScale, CHAINS["chain"]),
    (TraversalVerifier, WithoutPointMass, CHAINS["chain, partly chosen"]),
    (BlockVerifier, WithoutPointMass, CHAINS["chain, partly chosen"]),
    (RejectionVerifier, of_another_row, CHAINS["chain"]),
    (TraversalVerifier, of_another_row, CHAINS["chain"]),
    (BlockVerifier, of_another_row, CHAINS["chain"]),
    (RejectionVerifier, with_earlier_siblings, TREES["siblings, no two alike"]),
    (TraversalVerifier, with_earlier_siblings, TREES["siblings, no two alike"]),
]


@pytest.mark.parametrize(
    ("rule", "fault", "shape"), [pytest.param(*each, id=f"{each[0].__name__}-{each[1].__name__}") for each in FAULTS]
)
def test_a_wrong_residual_is_noticed(rule: Any, fault: Any, shape: Shape) -> None:
    vocab, num_seeds = (4, 8) if fault is with_earlier_siblings else (3, 2)
    assert worst_error(rule(fault), shape, vocab, num_seeds) > 1e-3


def test_the_known_wrong_traversal_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a public implementation of traversal verification biases the output.

    After a rejection, the path to the parent gets a new acceptance probability. The implementation wrongly takes the
    unnormalized sum of the target's residual, clamped to 1.
    """
    right = traversal._State.refuse

    def wrong(self: Any, leaf: torch.Tensor, is_refused: torch.Tensor, draft: Draft, *rest: Any) -> torch.Tensor:
        parent = draft.layout.up[leaf]
        missed = self.target.missed(leaf, self.kept[parent])
        following = right(self, leaf, is_refused, draft, *rest)
        self.kept[parent] = torch.where(is_refused, missed.clamp(max=1), self.kept[parent])
        return following

    monkeypatch.setattr(traversal._State, "refuse", wrong)
    assert worst_error(TraversalVerifier(), TREES["two levels"]) > 1e-3


class Rekeyed:
    """A random source with a deliberate bug: draws use the wrong stream or the wrong node in their key."""

    def __init__(self, source: Any, stream: Stream | None = None, node: int | None = None) -> None:
        self._source, self._stream, self._node = source, stream, node

    def target_token(self, weights: torch.Tensor, requests: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        return self._source.target_token(weights, requests, depths)

    def categorical(
        self, weights: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        return self._source.categorical(weights, *self._key(stream, nodes, requests))

    def bernoulli(
        self, prob: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        return self._source.bernoulli(prob, *self._key(stream, nodes, requests))

    def _key(self, stream: Stream, nodes: torch.Tensor, requests: torch.Tensor) -> Any:
        if self._node is not None:
            return stream, requests, torch.full_like(nodes, self._node)
        return self._stream, requests, (nodes - 1).clamp(min=0)  # verifiers count rows, of which the root is the first


class With:
    """A verifier that draws from a Rekeyed random source."""

    def __init__(self, rule: Any, **confusion: Any) -> None:
        self._rule, self._confusion = rule, confusion

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        return self._rule.verify(logits, draft, Rekeyed(random, **self._confusion))


@pytest.mark.parametrize("rule", VERIFIERS.values(), ids=VERIFIERS.keys())
@pytest.mark.parametrize("confusion", [{"stream": Stream.DRAFT}, {"node": 1}], ids=["the draft's", "reused"])
def test_confused_noise_is_noticed(rule: Any, confusion: dict) -> None:
    shape = CHAINS["chain"] if rule is BlockVerifier else TREES["depth first"]
    assert worst_error(With(rule(), **confusion), shape) > 1e-3


@pytest.mark.parametrize("rule", VERIFIERS.values(), ids=VERIFIERS.keys())
def test_dropping_an_unlikely_sampled_node_is_noticed(rule: Any) -> None:
    """Dropping a sampled node because its own token is unlikely biases the output."""

    def pruned(shape: Shape, q: Model, random: RandomSource) -> Draft:
        draft = draw(shape, q, random)
        is_unlikely = q[()][int(draft.token_ids[0])] < 0.4
        return draw(Shape((), (), is_chain=True), q, random) if is_unlikely else draft

    assert worst_error(rule(), CHAINS["one"], draw=pruned) > 1e-3


class DrawsFirst:
    """A verifier with a deliberate bug: it draws the target's token first. If no child has that token, it does
    rejection sampling against the unchanged target."""

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        verdict = ChosenVerifier().verify(logits, draft, random)
        return verdict if int(verdict.num_accepted[0]) else RejectionVerifier().verify(logits, draft, random)


def test_drawing_before_rejecting_is_noticed() -> None:
    assert worst_error(DrawsFirst(), CHAINS["one"]) > 1e-3


# Batches and vocabularies


@pytest.mark.parametrize("rule", VERIFIERS.values(), ids=VERIFIERS.keys())
@pytest.mark.parametrize("vocab", [2, 100, 8193, 10000, 151936])
def test_a_request_gets_what_it_gets_alone(rule: Any, vocab: int) -> None:
    shapes = list((CHAINS if rule is BlockVerifier else CHAINS | TREES).values())
    num_accepted, num_drafted = 0, 0
    for seed in range(20 if vocab < 1000 else 1):
        logits, draft = random_batch(shapes, vocab, seed)
        together = rule().verify(logits, draft, noise(0, len(shapes)))
        for b in range(len(shapes)):
            alone = rule().verify(*part(logits, draft, b), noise(b, 1))
            for found, expected in (
                (together.token_ids, alone.token_ids),
                (together.rows - together.rows[b, 0], alone.rows),
            ):
                assert torch.equal(found[b], expected[0])
            assert together.num_accepted[b] == alone.num_accepted[0]
        is_token = torch.arange(draft.max_depth + 1) <= together.num_accepted.unsqueeze(1)
        assert bool((together.token_ids[is_token] >= 0).all() and (together.token_ids[is_token] < vocab).all())
        assert bool((together.token_ids[~is_token] == -1).all())
        num_accepted, num_drafted = num_accepted + int(together.num_accepted.sum()), num_drafted + draft.num_nodes
    assert 0 < num_accepted < num_drafted
