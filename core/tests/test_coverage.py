"""What several proposers' drafts are worth beside each other, and how many of each one's tokens were accepted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from specdec_core.budget.choice import Expected
from specdec_core.budget.coverage import expected_with, worth_beside
from specdec_core.budget.survival import GUESS, Survival
from specdec_core.contracts.draft import Draft, DraftTree
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.own_counts import OwnCounts, accepted_by


def requests(number: int) -> list[Any]:
    return [SimpleNamespace(id=str(i)) for i in range(number)]


@pytest.fixture
def survival() -> Survival:
    made = Survival(4)
    for request in requests(4):
        made.start(request, is_sampled=False)
    return made


def test_what_one_draft_covers_the_next_one_adds_nothing_to(survival: Survival) -> None:
    chains = Draft.from_chains([[5, 6], [], [7]])
    found = expected_with(chains, 0.5, Expected.of_plain(3), survival, requests(3))
    assert found.covered is not None
    assert np.allclose(found.covered, [[GUESS, GUESS**2], [0, 0], [GUESS, 0]])
    assert np.allclose(found.tokens, [1 + GUESS + GUESS**2, 1, 1 + GUESS])
    assert (found.num_rows, found.draft_s) == (6, 0.5)
    again = expected_with(chains, 0.5, found, survival, requests(3))
    assert again.covered is not None
    assert np.allclose(1 - again.covered, (1 - found.covered) ** 2), "as if the two were independent"


def test_siblings_add_up_and_dead_nodes_count_for_nothing(survival: Survival) -> None:
    tree = Draft.from_trees([DraftTree([5, 6, 7, 8], [-1, -1, -1, 0])])
    tree = evolve(tree, parents=torch.tensor([-1, -1, -2, 0], dtype=torch.int32), scores=torch.full((4,), 0.3))
    one = float(survival.of_nodes(np.array([0]), np.array([0.3]), np.array([False]))[0])
    found = expected_with(tree, 0.0, Expected.of_plain(1), survival, requests(1))
    assert found.covered is not None
    assert np.allclose(found.covered, [[2 * one, one**2]])


def test_a_request_that_is_covered_is_worth_less(survival: Survival) -> None:
    covered = np.array([[0.0, 0.0], [1.0, 1.0], [0.9, 0.2]])
    free, full, some = worth_beside(covered, survival, np.arange(3))
    assert free == 1
    assert 0 < full < 0.6, "deeper levels are not covered"
    assert full < some < 1


def test_accepted_tokens_count_for_each_that_drafted_them() -> None:
    verdict = Verdict(
        token_ids=torch.tensor([[5, 6, 9, -1], [4, -1, -1, -1]]),
        rows=torch.zeros(2, 4, dtype=torch.int64),
        num_accepted=torch.tensor([2, 0]),
    )
    tree = Draft.from_trees([DraftTree([8, 5, 7, 6], [-1, -1, 1, 1]), DraftTree([4], [-1])])
    counts = OwnCounts()
    drafts = {"tree": tree, "chain": Draft.from_chains([[5], []]), "none": None}
    counts.add(drafts, accepted_by(drafts, verdict), [2, 0])
    found = {metric.name: metric.value for metric in counts.metrics()}
    assert found == {
        "tree_num_drafts": 2,
        "tree_num_draft_tokens": 5,
        "tree_num_accepted_tokens": 2,
        "chain_num_drafts": 1,
        "chain_num_draft_tokens": 1,
        "chain_num_accepted_tokens": 1,
        "none_num_drafts": 0,
        "none_num_draft_tokens": 0,
        "none_num_accepted_tokens": 0,
    }
