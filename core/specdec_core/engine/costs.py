"""What passes and drafts cost, measured over an engine's first steps with drafts and fixed from then on."""

from __future__ import annotations

import numpy as np

from specdec_core.types import StepCosts

NUM_SKIPPED = 4  # first steps, in which memory is allocated and code compiled
NUM_STEPS = 16


class CostMeter:
    """Fits straight lines to the times of steps that only decode: of the target's pass over its tokens, of drafting
    over its levels. Slopes are medians over pairs of steps (Theil-Sen), so that a few slow steps do not matter.

    Fixed, so that drafts do not depend on the machine's moods for ever. What they are at other batch sizes than those
    of the first steps is the lines' guess. Where all drafts are alike there is no line, and no costs.
    """

    def __init__(self) -> None:
        self.costs: StepCosts | None = None
        self._num_skipped = 0
        self._steps: list[tuple[float, float, int, int]] = []

    def add(self, draft_s: float, target_s: float, num_tokens: int, depth: int) -> None:
        """A step in which all requests decoded, with drafts of that depth. num_tokens: of the target's pass."""
        if self.costs is not None:
            return
        if self._num_skipped < NUM_SKIPPED:
            self._num_skipped += 1
            return
        self._steps.append((draft_s, target_s, num_tokens, depth))
        if len(self._steps) < NUM_STEPS:
            return
        draft, target, tokens, depths = np.array(self._steps).T
        self._steps.clear()  # where they were all alike, the next ones may differ
        if np.ptp(tokens) and np.ptp(depths):
            token_s = _slope(tokens, target)
            rest = float(np.median(target - token_s * tokens))
            # A pass over one token takes some time, whatever the fit makes of noise.
            self.costs = StepCosts(max(rest, float(target.min()) / 100), token_s, _slope(depths, draft))


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    """Not below 0."""
    first, second = np.triu_indices(len(x), 1)
    differs = x[first] != x[second]
    first, second = first[differs], second[differs]
    return max(0.0, float(np.median((y[second] - y[first]) / (x[second] - x[first]))))
