"""The one rule of the budget: take draft tokens as long as that makes a request's next output token come sooner, on
average over the requests of a step.

A step of T seconds in which request i is expected to get t_i output tokens takes T / t_i for each. The rule minimizes
the sum of these. The sum of all output tokens per second would be another measure: it is higher where the drafts of few
requests slow down all others, which then are still running, in small and inefficient batches, when those few have
finished (docs/architecture.md, Decisions).
"""

from __future__ import annotations

import numpy as np
from attrs import frozen


@frozen(eq=False)
class Expected:
    """What a step is expected to yield and to cost so far.

    tokens: float64 [requests], output tokens of each request that may get more drafts.
    num_rows: tokens in the target's forward pass, but for those of prompts: these have to be read anyway, and what
        drafts save is steps without prompts.
    draft_s: seconds of drafting.
    covered: float64 [requests, depths], how likely the drafts of other proposers are to have the right token at each
        depth; None: there are none.
    others: of all other requests, the sum of 1 / output tokens.
    """

    tokens: np.ndarray
    num_rows: int
    draft_s: float = 0.0
    covered: np.ndarray | None = None
    others: float = 0.0

    @classmethod
    def of_plain(cls, num_requests: int) -> Expected:
        """A step without drafts, in which each request gets a token."""
        return cls(np.ones(num_requests), num_requests)

    @property
    def steps_per_token(self) -> float:
        """The sum over all requests."""
        return self.others + float((1 / self.tokens).sum())

    def after_drafting(self, seconds: float) -> Expected:
        """The same step after so many further seconds of drafting."""
        return Expected(self.tokens, self.num_rows, self.draft_s + seconds, self.covered, self.others)

    def only(self, requests: np.ndarray) -> Expected:
        """The same step, with further drafts for some requests only. requests: int64 [n], their indices."""
        chosen = self.tokens[requests]
        others = self.steps_per_token - float((1 / chosen).sum())
        covered = None if self.covered is None else self.covered[requests]
        return Expected(chosen, self.num_rows, self.draft_s, covered, others)


def best_levels(
    gains: np.ndarray,
    sizes: np.ndarray,
    so_far: Expected,
    seconds: np.ndarray,
    first_s: float,
    level_s: float,
    none_found: float = 0.0,
) -> tuple[np.ndarray, float]:
    """int64 [n]   how many further levels of draft tokens each request should get, so that the expected time per output
    token is lowest, and by what share they lower it. All 0 if no level does.

    gains: float64 [n, num_levels], how many more accepted tokens each level is expected to bring; never rising.
    sizes: int64 or float64 [n], the draft tokens, or expected ones, of a level of each request.
    seconds: float64, of a step but for drafting, by its number of tokens (`CostCurve.seconds`).
    first_s: seconds of drafting anything at all. level_s: of each level, for all requests together.
    none_found: the probability that there is no draft token in the step. Then it takes as long as without: the time of
        the expected number of tokens would be too long, since the first further token takes most.
    """
    tokens = so_far.tokens[:, None]
    saved = -np.diff(1 / (tokens + gains.cumsum(axis=1)), axis=1, prepend=1 / tokens)
    per_row = (saved / sizes[:, None]).T.ravel()
    order = np.argsort(-per_row, kind="stable")  # of equal ones, the shallower first: levels cost time
    levels, requests = np.divmod(order, len(gains))
    some_found, now_s = 1 - none_found, float(_at(seconds, so_far.num_rows))
    rows = so_far.num_rows + sizes[requests].cumsum() / max(some_found, 1e-9)
    deepest = np.maximum.accumulate(levels) + 1
    target_s = some_found * _at(seconds, rows) + none_found * now_s
    total_s = target_s + so_far.draft_s + first_s + level_s * deepest
    now = so_far.steps_per_token
    times = (now - saved[requests, levels].cumsum()) * total_s
    best = int(times.argmin())
    saved_share = 1 - float(times[best] / (now * (now_s + so_far.draft_s)))
    if saved_share <= 0:
        return np.zeros(len(gains), dtype=np.int64), 0.0
    return np.bincount(requests[: best + 1], minlength=len(gains)), saved_share


def best_nodes(gains: np.ndarray, requests: np.ndarray, so_far: Expected, seconds: np.ndarray) -> np.ndarray:
    """bool [num_nodes]   which draft tokens to verify, so that the expected time per output token is lowest.

    gains: float64 [num_nodes], the estimated probability of each to be accepted; at most that of its parent, which
        comes before it.
    requests: int64 [num_nodes], the index of each one's request.
    """
    by_request = np.lexsort((-gains, requests))  # stable
    sorted_gains, owners = gains[by_request], requests[by_request]
    after = sorted_gains.cumsum()
    after -= np.concatenate([[0.0], after])[np.searchsorted(owners, owners)]  # of the same request
    tokens = so_far.tokens[owners] + after
    saved = np.empty_like(gains)
    saved[by_request] = 1 / (tokens - sorted_gains) - 1 / tokens
    order = by_request[np.argsort(-saved[by_request], kind="stable")]
    total_s = _at(seconds, so_far.num_rows + np.arange(len(gains) + 1)) + so_far.draft_s
    steps = so_far.steps_per_token - np.concatenate([[0.0], saved[order].cumsum()])
    kept = np.zeros(len(gains), dtype=bool)
    kept[order[: int((steps * total_s).argmin())]] = True
    return kept


def _at(seconds: np.ndarray, rows: np.ndarray | int) -> np.ndarray:
    rows = np.minimum(rows, len(seconds) - 1)
    below = rows.astype(np.int64)
    found: np.ndarray = seconds[below]
    if rows.dtype.kind == "f":
        found = found + (rows - below) * (seconds[np.minimum(below + 1, len(seconds) - 1)] - found)
    return found
