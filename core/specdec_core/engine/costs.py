"""Estimates the time of the target's forward pass from measurements in an engine's first steps."""

from __future__ import annotations

import numpy as np

from specdec_core.contracts.proposer import StepCosts
from specdec_core.contracts.report import StepReport

NUM_SKIPPED = 4  # first steps, which are slower than later ones
NUM_STEPS = 16


class CostMeter:
    """Estimates the time of the target's forward pass from its number of tokens, as a constant plus a time per token.
    The line is fitted to measured steps; steps with prefill tokens are not measured. The time per token is the median
    slope over pairs of steps (Theil-Sen), so a few slow steps do not change it.

    `costs` has the fitted line. It is None until enough steps with different numbers of tokens were measured. After
    that it never changes, so that later load on the machine does not change drafts.
    """

    def __init__(self) -> None:
        self.costs: StepCosts | None = None
        self._num_skipped = 0
        self._steps: list[tuple[float, int]] = []

    def add(self, report: StepReport) -> None:
        """Record a step's time and number of tokens, unless it had prefill tokens or `costs` is fixed already."""
        if self.costs is not None or report.num_prefill_tokens:
            return
        if self._num_skipped < NUM_SKIPPED:
            self._num_skipped += 1
            return
        self._steps.append((report.target_s, report.num_nodes + report.num_decode_requests))
        if len(self._steps) < NUM_STEPS:
            return
        target, tokens = np.array(self._steps).T
        self._steps.clear()  # if all were of one size, the next ones may differ
        if np.ptp(tokens):
            token_s = _slope(tokens, target)
            rest = float(np.median(target - token_s * tokens))
            # With noisy times the line may fall below 0 at one token, which no forward pass does.
            self.costs = StepCosts(max(rest, float(target.min()) / 100), token_s)


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    """The Theil-Sen slope of y over x (the median over pairs of points with different x), at least 0."""
    first, second = np.triu_indices(len(x), 1)
    differs = x[first] != x[second]
    first, second = first[differs], second[differs]
    return max(0.0, float(np.median((y[second] - y[first]) / (x[second] - x[first]))))
