"""Steps in a row for which it was decided beforehand that no proposer is asked."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from specdec_core.engine.arrears import Features
from specdec_core.engine.request import Request

LEAST_STEPS, MOST_STEPS, SECONDS = 32, 96, 0.04
"""A rest that nothing ends earlier lasts about so many seconds, beside which learning from its steps takes little time,
and so many steps at least and at most. A change of the costs is noticed only after it."""


@define(eq=False)
class Rest:
    """Steps of the same requests, without prefill, which should take no longer than in plain decoding. So their hidden
    states are only collected. The proposers' observers store them when the rest ends.

    starts: the position of each request's last token in the first of the steps.
    num_left: the number of further steps.
    passes: of each step's forward pass.
    """

    requests: list[Request]
    starts: list[int]
    num_left: int
    passes: list[Features] = field(factory=list)

    @classmethod
    def of(cls, requests: Sequence[Request], most_steps: int, step_s: float) -> Rest:
        """A rest that begins with a step of these requests. step_s: the seconds of such a step."""
        starts = [request.num_computed for request in requests]
        length = min(max(int(SECONDS / step_s), LEAST_STEPS), MOST_STEPS)
        return cls(list(requests), starts, min(length, most_steps) - 1)

    def goes_on(self, requests: Sequence[Request]) -> bool:
        """Whether a step of these requests belongs to it. If so, there is one less left."""
        if not self.num_left or requests != self.requests:
            return False
        self.num_left -= 1
        return True
