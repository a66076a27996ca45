"""What a pass of the target costs, measured over an engine's first steps and fixed from then on."""

from __future__ import annotations

import numpy as np

from specdec_core.contracts.proposer import StepCosts
from specdec_core.contracts.report import StepReport

NUM_SKIPPED = 4  # first steps, in which memory is allocated and code compiled
NUM_STEPS = 16


class CostMeter:
    """Fits a straight line to the times of steps that only decode, over their tokens. Its slope is the median over
    pairs of steps (Theil-Sen), so that a few slow steps do not matter.

    Fixed, so that drafts do not depend for ever on what else a machine does. What a pass costs at other batch sizes
    than those of the first steps is the line's guess. Where all steps are alike there is no line, and no costs.
    """

    def __init__(self) -> None:
        self.costs: StepCosts | None = None
        self._num_skipped = 0
        self._steps: list[tuple[float, int]] = []

    def add(self, report: StepReport) -> None:
        """Counts steps in which all requests decoded."""
        if self.costs is not None or report.num_prefill_tokens:
            return
        if self._num_skipped < NUM_SKIPPED:
            self._num_skipped += 1
            return
        self._steps.append((report.target_s, report.num_nodes + report.num_decode_requests))
        if len(self._steps) < NUM_STEPS:
            return
        target, tokens = np.array(self._steps).T
        self._steps.clear()  # where they were all alike, the next ones may differ
        if np.ptp(tokens):
            token_s = _slope(tokens, target)
            rest = float(np.median(target - token_s * tokens))
            # A pass over one token takes some time, whatever the fit makes of noise.
            self.costs = StepCosts(max(rest, float(target.min()) / 100), token_s)


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    """Not below 0."""
    first, second = np.triu_indices(len(x), 1)
    differs = x[first] != x[second]
    first, second = first[differs], second[differs]
    return max(0.0, float(np.median((y[second] - y[first]) / (x[second] - x[first]))))
