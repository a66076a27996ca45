"""Verifiers stay lossless, over all random draws, if the draft probabilities `q` are sparse: some tokens per row,
listed in q_ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from drawn_trees import DEAD, SAMPLED as S, Model, Shape, draw, emit, random_model

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Verdict
from specdec_core.ops.residuals import Residuals
from specdec_core.verifiers.block import BlockVerifier
from specdec_core.verifiers.rejection import RejectionVerifier
from specdec_core.verifiers.siblings import Siblings, proposals_of
from specdec_core.verifiers.traversal import TraversalVerifier

CHAINS = {
    "chain": Shape((-1, 0), (S, S), is_chain=True),
    "partly chosen, a dead tail": Shape((-1, 0, DEAD), (1, S, S), is_chain=True),
}
TREES = {
    "siblings": Shape((-1, -1, 0), (S, S, S)),
    "no two alike": Shape((-1, -1, 0), (S, S, S), with_replacement=False),
    "chosen and dead nodes": Shape((-1, -1, DEAD, 1), (S, 1, S, S)),
}
VERIFIERS = {"rejection": RejectionVerifier, "block": BlockVerifier, "traversal": TraversalVerifier}
CASES = [
    pytest.param(rule(), shape, id=f"{name}-{title}")
    for name, rule in VERIFIERS.items()
    for title, shape in (CHAINS if name == "block" else CHAINS | TREES).items()
]
VOCAB, MOST = 4, 3
"""The size of the vocabulary, and the most tokens that any row of `q` gives a probability."""


def models(seed: int) -> tuple[Model, Model]:
    target, q = random_model(VOCAB, 4, seed), random_model(VOCAB, 4, seed + 1000, impossible=0)
    for probs in q.values():
        probs[probs.argmin()] = 0
        probs /= probs.sum()
    return target, q


def in_few_columns(draft: Draft, num_columns: int = MOST) -> Draft:
    """Return the draft with a sparse `q`. Each row keeps its num_columns likeliest tokens, in an order that differs
    between rows."""
    order = draft.q.argsort(dim=1, descending=True)[:, :num_columns]
    ids = torch.stack([row.roll(i) for i, row in enumerate(order)]) if len(order) else order
    return evolve(draft, q=draft.q.gather(1, ids), q_ids=ids)


def draw_sparse(shape: Shape, q: Model, random: RandomSource) -> Draft:
    return in_few_columns(draw(shape, q, random))


@pytest.mark.parametrize(("verifier", "shape"), CASES)
def test_lossless(verifier: Any, shape: Shape) -> None:
    assert emit(verifier, *models(0), shape, draw_sparse).error < 1e-12


@pytest.mark.parametrize("num_columns", [MOST, VOCAB])
def test_it_says_the_same_as_a_dense_one(num_columns: int) -> None:
    rng = np.random.default_rng(0)
    q = torch.tensor(np.array(list(models(0)[1].values())[:6]))
    draft = evolve(
        Draft.from_chains([q.argmax(dim=1).tolist()]),
        q=q,
        q_rows=torch.tensor(rng.permutation(6), dtype=torch.int32),
    )
    rows = draft.layout.node_rows
    logits = torch.tensor(rng.normal(size=(7, VOCAB)))
    dense, sparse = (
        Residuals(logits, proposals_of(each, Siblings.of(each), VOCAB))
        for each in (draft, in_few_columns(draft, num_columns))
    )
    assert torch.allclose(dense.ratios(rows), sparse.ratios(rows), atol=1e-15)
    assert torch.allclose(dense._drawn(rows), sparse._drawn(rows), atol=1e-15)


LEAST = 1e-6  # as probability of what was drawn 0 would be found out at once


def ids_are_ignored(draft: Draft) -> Draft:
    q = torch.nn.functional.pad(draft.q, (0, VOCAB - draft.q.shape[1]))
    return evolve(draft, q=q.clamp(min=LEAST), q_ids=None)


def ids_of(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Draft], Draft]:
    def changed(draft: Draft) -> Draft:
        q = draft.q.new_zeros(len(draft.q), VOCAB).scatter_(1, change(draft.q_ids), draft.q)
        return evolve(draft, q=q.clamp(min=LEAST), q_ids=None)

    return changed


@frozen
class Faulty:
    """A verifier that reads the draft probabilities wrongly."""

    rule: Any
    change: Callable[[Draft], Draft]

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        return self.rule.verify(logits, self.change(draft), random)


FAULTS = {
    "ids are ignored": ids_are_ignored,
    "the ids of another row": ids_of(lambda ids: ids.roll(1, dims=0)),
    "columns in another order": ids_of(lambda ids: ids.roll(1, dims=1)),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("rule", VERIFIERS.values(), ids=VERIFIERS)
def test_a_fault_is_noticed(rule: Any, fault: Any) -> None:
    faulty = Faulty(rule(), fault)
    assert max(emit(faulty, *models(seed), CHAINS["chain"], draw_sparse).error for seed in range(2)) > 1e-3
