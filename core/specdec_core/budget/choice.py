"""The one rule of the budget: take draft tokens as long as that raises the expected output tokens per second."""

from __future__ import annotations

import numpy as np
from attrs import frozen


@frozen(eq=False)
class Expected:
    """What a step is expected to yield and to cost so far.

    num_tokens: output tokens.
    num_rows: tokens in the target's forward pass.
    draft_s: seconds of drafting, and of all that is neither drafting nor the target's forward pass and verification.
    covered: float64 [requests, depths], how likely the drafts of other proposers are to have the right token at each
        depth; None: there are none.
    """

    num_tokens: float
    num_rows: int
    draft_s: float = 0.0
    covered: np.ndarray | None = None


def best_levels(
    gains: np.ndarray, sizes: np.ndarray, so_far: Expected, seconds: np.ndarray, first_s: float, level_s: float
) -> np.ndarray:
    """int64 [n]   how many further levels of draft tokens each request should get, so that the expected output tokens
    per second are highest. All 0 if no level raises them.

    gains: float64 [n, num_levels], how many more accepted tokens each level is expected to bring; never rising.
    sizes: int64 or float64 [n], the draft tokens, or expected ones, of a level of each request.
    seconds: float64, of the target's forward pass by its number of tokens (`CostCurve.seconds`).
    first_s: seconds of drafting anything at all. level_s: of each level, for all requests together.
    """
    per_row = gains / sizes[:, None]
    order = np.argsort(-per_row.T.ravel(), kind="stable")  # of equal ones, the shallower first: levels cost time
    levels, requests = np.divmod(order, len(gains))
    rows = so_far.num_rows + sizes[requests].cumsum()
    deepest = np.maximum.accumulate(levels) + 1
    total_s = _at(seconds, rows) + so_far.draft_s + first_s + level_s * deepest
    rates = (so_far.num_tokens + gains[requests, levels].cumsum()) / total_s
    best = int(rates.argmax())
    if rates[best] <= so_far.num_tokens / (_at(seconds, so_far.num_rows) + so_far.draft_s):
        return np.zeros(len(gains), dtype=np.int64)
    return np.bincount(requests[: best + 1], minlength=len(gains))


def best_nodes(gains: np.ndarray, so_far: Expected, seconds: np.ndarray) -> np.ndarray:
    """bool [num_nodes]   which draft tokens to verify, so that the expected output tokens per second are highest.

    gains: float64 [num_nodes], the estimated probability of each to be accepted; below that of its parent.
    """
    order = np.argsort(-gains, kind="stable")
    total_s = _at(seconds, so_far.num_rows + np.arange(len(gains) + 1)) + so_far.draft_s
    tokens = so_far.num_tokens + np.concatenate([[0.0], gains[order].cumsum()])
    kept = np.zeros(len(gains), dtype=bool)
    kept[order[: int((tokens / total_s).argmax())]] = True
    return kept


def _at(seconds: np.ndarray, rows: np.ndarray | int) -> np.ndarray:
    rows = np.minimum(rows, len(seconds) - 1)
    below = rows.astype(np.int64)
    found: np.ndarray = seconds[below]
    if rows.dtype.kind == "f":
        found = found + (rows - below) * (seconds[np.minimum(below + 1, len(seconds) - 1)] - found)
    return found
