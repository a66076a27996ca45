"""A choice of draft tokens that holds for some steps: choosing and learning each take as long as a small draft."""

from __future__ import annotations

from collections.abc import Sequence
from operator import le

from attrs import define, evolve

from specdec_core.contracts.proposer import RequestView

NUM_HELD, MOST_HELD, CHOICE_SHARE = 8, 32, 0.02
"""Steps for which a choice holds: at least NUM_HELD, and where steps are short, so many that choosing takes
CHOICE_SHARE of the time. Then the budget learns from all that was drafted meanwhile, and chooses again. A choice that
is like the one before holds for twice as many steps as that. No choice holds for more than MOST_HELD steps."""
LEAST_LEFT = 0.75
"""The share of its requests, and of those that draft, for which a choice holds on after others have ended."""


@define
class Held:
    """What was chosen, and for what.

    is_beside: other proposers had drafts. is_informed: it was known how long drafts of these requests take. length: the
    number of steps for which it holds. num_left: how many of these are left, with the one that goes by it now. size,
    num_drafting: the number of requests that it was made for, and of those that draft.
    """

    requests: Sequence[RequestView]
    limits: list[int]
    numbers: list[int]
    is_beside: bool
    is_informed: bool
    length: int
    num_left: int
    size: int
    num_drafting: int

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
        """least: the number of steps for which it holds if the choice before, which is over now, was another one."""
        if before is not None and before._is_over_and_like(requests, numbers):
            least = min(max(least, 2 * before.length), MOST_HELD)
        num_drafting = sum(map(bool, numbers))
        return cls(requests, limits, numbers, is_beside, is_informed, least, least, len(requests), num_drafting)

    def is_for(self, requests: Sequence[RequestView], limits: list[int], *, is_beside: bool, is_informed: bool) -> bool:
        """Whether it still holds. Where a limit has grown, more draft tokens may pay. Beside drafts of other proposers,
        none pay that do not pay alone."""
        is_alike = not any(self.numbers) if is_beside else not self.is_beside
        is_alike = is_alike and is_informed == self.is_informed
        return self.num_left > 1 and is_alike and self.requests == requests and all(map(le, limits, self.limits))

    def end_soon(self) -> None:
        """Note that other requests were tried: there is something to learn of them."""
        self.num_left = min(self.num_left, NUM_HELD)

    def without(self, request: RequestView) -> Held | None:
        """The choice for the other requests; None: too few are left, or none that drafts."""
        left = [i for i, other in enumerate(self.requests) if other.id != request.id]
        numbers = [self.numbers[i] for i in left]
        num_drafting = sum(map(bool, numbers))
        if len(left) < LEAST_LEFT * self.size or num_drafting < max(1, LEAST_LEFT * self.num_drafting):
            return None
        requests, limits = [self.requests[i] for i in left], [self.limits[i] for i in left]
        return evolve(self, requests=requests, limits=limits, numbers=numbers)

    def _is_over_and_like(self, requests: Sequence[RequestView], numbers: list[int]) -> bool:
        """Whether its steps are over, and these numbers of draft tokens nearly its own. Not if it ended early: then
        there is little that could have been learned."""
        if self.num_left > 1 or self.requests != requests:
            return False
        return all(bool(a) == bool(b) and abs(a - b) <= 1 for a, b in zip(self.numbers, numbers, strict=True))
