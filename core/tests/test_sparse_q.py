"""Sparse draft probabilities `q`, some tokens per row, listed in q_ids: they say the same as dense ones, and the
conformance kit's enumeration notices verifiers that read them wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Verdict
from specdec_core.ops.residuals import Residuals
from specdec_core.verifiers.block import BlockVerifier
from specdec_core.verifiers.rejection import RejectionVerifier
from specdec_core.verifiers.siblings import Siblings, proposals_of
from specdec_core.verifiers.traversal import TraversalVerifier
from specdec_testing.conformance.shapes import FEW, SPARSE, draw_sparse, in_few_columns, sparse_models
from specdec_testing.drawn_trees import emit

VOCAB = 4
VERIFIERS = {"rejection": RejectionVerifier, "block": BlockVerifier, "traversal": TraversalVerifier}


@pytest.mark.parametrize("num_columns", [FEW, VOCAB])
def test_it_says_the_same_as_a_dense_one(num_columns: int) -> None:
    rng = np.random.default_rng(0)
    q = torch.tensor(np.array(list(sparse_models(0)[1].values())[:6]))
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
    assert (
        max(emit(faulty, *sparse_models(seed), SPARSE["sparse chain"], draw_sparse).error for seed in range(2)) > 1e-3
    )
