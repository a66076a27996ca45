"""Which draft tokens of a draft are not worth verifying."""

from __future__ import annotations

import numpy as np

from specdec_core.budget.choice import Expected, best_nodes
from specdec_core.budget.nodes import Nodes, without
from specdec_core.budget.survival import Survival
from specdec_core.contracts.draft import Draft


def without_dear_nodes(
    draft: Draft,
    rows: np.ndarray,
    worth: np.ndarray,
    survival: Survival,
    so_far: Expected,
    seconds: np.ndarray,
    *,
    in_place: bool,
) -> tuple[Draft, float]:
    """Return the draft without chosen draft tokens that are not worth verifying, and the share of the expected gain
    that is left. Requests with a sampled one keep all of theirs.

    draft: with scores. rows: int64 [requests], in `survival`. worth: float64 [requests] or [1], the share of accepted
    draft tokens that other proposers are expected not to have. so_far: what the step is expected to yield without the
    draft; its draft_s has the time that this took. seconds, in_place: as `best_nodes` and `Budget` have them.
    """
    nodes = Nodes.of(draft)
    assert nodes.scores is not None
    has_sampled = np.zeros(draft.batch_size, dtype=bool)
    has_sampled[nodes.requests[nodes.is_first]] = True
    whole = has_sampled[nodes.requests]
    own = survival.of_nodes(rows[nodes.requests], nodes.scores, nodes.is_first)
    gains = nodes.down_the_tree(np.where(nodes.depths > 0, own, 0))
    gains *= np.broadcast_to(worth, draft.batch_size)[nodes.requests]
    with_whole = Expected(
        so_far.tokens + np.bincount(nodes.requests, np.where(whole, gains, 0), draft.batch_size),
        so_far.num_rows + int(whole.sum()),
        so_far.draft_s,
        others=so_far.others,
    )
    kept = best_nodes(np.where(whole, 0, gains), nodes.requests, with_whole, seconds) | whole
    if in_place:
        last = np.full(draft.batch_size, -1)
        np.maximum.at(last, nodes.requests[kept], np.flatnonzero(kept))
        kept = np.arange(len(kept)) <= last[nodes.requests]
    if kept.all():
        return draft, 1.0
    total = float(gains.sum())
    return without(draft, nodes, kept), float(gains[kept].sum()) / total if total else 1.0
