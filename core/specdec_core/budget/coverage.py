"""What the drafts of several proposers have in common: tokens that another proposer's draft is expected to have, too,
are not worth drafting again. Draft tokens of different proposers count as independent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec_core.budget.choice import Expected
from specdec_core.budget.nodes import Nodes
from specdec_core.budget.survival import Survival
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import RequestView

FEWEST_COMPARED = 8
"""Levels by which drafts are compared, at least."""


def expected_with(
    draft: Draft, drafted_s: float, so_far: Expected, survival: Survival, requests: Sequence[RequestView]
) -> Expected:
    """Return what a step is expected to yield together with a draft, whose values are on the host.

    drafted_s: the seconds that drafting it took.
    so_far: what the step is expected to yield without it: of the same requests.
    survival: of the draft's proposer. requests: those of the draft.
    """
    nodes, rows = Nodes.of(draft), survival.rows(requests)
    width = max(int(nodes.depths.max()), 0 if so_far.covered is None else so_far.covered.shape[1])
    if nodes.scores is None:
        own = survival.of_levels(rows, 0, max(1, width))[nodes.requests, nodes.depths - 1]
    else:
        own = survival.of_nodes(rows[nodes.requests], nodes.scores, nodes.is_first)
    is_alive = nodes.depths > 0
    gains = nodes.down_the_tree(np.where(is_alive, own, 0))
    covered, before = np.zeros((2, len(requests), width))
    np.add.at(covered, (nodes.requests[is_alive], nodes.depths[is_alive] - 1), gains[is_alive])
    if so_far.covered is not None:
        before[:, : so_far.covered.shape[1]] = so_far.covered
    covered = 1 - (1 - covered.clip(max=1)) * (1 - before)
    return Expected(
        so_far.tokens + (covered - before).sum(axis=1),
        so_far.num_rows + draft.num_nodes,
        so_far.draft_s + drafted_s,
        covered,
    )


def worth_beside(covered: np.ndarray, survival: Survival, rows: np.ndarray) -> np.ndarray:
    """float64 [n]   the share of each request's accepted draft tokens that the drafts of other proposers are not
    expected to have.

    covered: `Expected.covered` of these requests. survival, rows: of the proposer that is to draft.
    """
    gains = survival.of_levels(rows, 0, max(FEWEST_COMPARED, covered.shape[1])).cumprod(axis=1)
    missed = gains.copy()
    missed[:, : covered.shape[1]] *= 1 - covered
    worth: np.ndarray = missed.sum(axis=1) / gains.sum(axis=1)
    return worth
