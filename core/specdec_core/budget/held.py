"""A choice of draft tokens that holds for some steps: choosing and learning each take as long as a small draft."""

from __future__ import annotations

from collections.abc import Sequence
from operator import le

from attrs import define, evolve

from specdec_core.contracts.proposer import RequestView

NUM_HELD, MOST_HELD, SHARE = 8, 32, 0.02
"""Steps for which a choice holds while the requests stay the same: at least NUM_HELD, and where these are over soon, so
many that choosing takes SHARE of the time. Then is learned from all that was drafted meanwhile. If the same requests
draft again, the next choice holds for twice as many, up to MOST_HELD."""
LEAST_LEFT = 0.75
"""The share of its requests for which a choice holds on when others have ended."""


@define
class Held:
    """What was chosen, and for what.

    is_beside: other proposers had drafts. is_informed: it was known how long drafts of these requests take. length: the
    steps for which it holds, of which num_left are left. size: the number of requests that it was made for.
    """

    requests: Sequence[RequestView]
    limits: list[int]
    numbers: list[int]
    is_beside: bool
    is_informed: bool
    length: int
    num_left: int
    size: int

    @classmethod
    def of(
        cls,
        requests: Sequence[RequestView],
        limits: list[int],
        numbers: list[int],
        *,
        is_beside: bool,
        is_informed: bool,
        least: int,
        before: Held | None,
    ) -> Held:
        """before: the choice that held until now. least: the steps for which this one holds, at least."""
        length = least
        if before is not None and before.requests == requests and before._drafting == [*map(bool, numbers)]:
            length = min(max(least, 2 * before.length), MOST_HELD)
        return cls(requests, limits, numbers, is_beside, is_informed, length, length, len(requests))

    @property
    def _drafting(self) -> list[bool]:
        return [*map(bool, self.numbers)]

    def is_for(self, requests: Sequence[RequestView], limits: list[int], *, is_beside: bool, is_informed: bool) -> bool:
        """Whether it still holds. Where a limit has grown, more draft tokens may pay. Beside drafts of other proposers,
        none pay that do not pay alone."""
        is_alike = not any(self.numbers) if is_beside else not self.is_beside
        is_alike = is_alike and is_informed == self.is_informed
        return self.num_left > 1 and is_alike and self.requests == requests and all(map(le, limits, self.limits))

    def end_soon(self) -> None:
        """Note that other requests were tried, of which is to be learned."""
        self.num_left = min(self.num_left, NUM_HELD)

    def without(self, request: RequestView) -> Held | None:
        """The choice for the other requests; None: too few are left."""
        left = [i for i, other in enumerate(self.requests) if other.id != request.id]
        if len(left) < LEAST_LEFT * self.size:
            return None
        return evolve(
            self,
            requests=[self.requests[i] for i in left],
            limits=[self.limits[i] for i in left],
            numbers=[self.numbers[i] for i in left],
        )
