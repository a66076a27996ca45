"""What each of several proposers contributed to a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import astuple

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.own_counts import OwnCounts, accepted_by

CPU = torch.device("cpu")
VERDICT = Verdict(
    torch.tensor([[5, 6, 9, -1], [7, 8, -1, -1], [3, -1, -1, -1]]),
    torch.zeros(3, 4, dtype=torch.int32),
    torch.tensor([2, 1, 0], dtype=torch.int32),
)


def counted(*chains: list[list[int]] | None) -> list[tuple[Any, ...]]:
    """(drafts, draft tokens, accepted ones) of each proposer."""
    found = OwnCounts()
    drafts = {str(i): None if each is None else Draft.from_chains(each, CPU) for i, each in enumerate(chains)}
    found.add(drafts, accepted_by(drafts, VERDICT), [1, 1, 0])
    return [astuple(each)[:3] for each in found.counts.values()]


@pytest.mark.parametrize("others", [None, [[], [], []]], ids=["not_asked", "found_nothing"])
def test_a_proposer_that_drafted_alone_has_all_that_was_emitted(others: Any) -> None:
    assert counted([[5, 6, 1], [7], []], others) == [(2, 4, 2), (0, 0, 0)]


def test_two_proposers_have_what_each_had_right() -> None:
    assert counted([[5, 6, 1], [2], [4]], [[1], [7, 8], []]) == [(3, 5, 1), (2, 3, 1)]
