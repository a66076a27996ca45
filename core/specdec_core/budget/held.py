"""A choice of draft tokens that holds for some steps: choosing and learning each take as long as a small draft."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

NUM_HELD, MOST_HELD, CHOICE_SHARE = 8, 32, 0.02
"""Steps for which a choice holds: at least NUM_HELD, and where steps are short, so many that choosing takes
CHOICE_SHARE of the time. Then the budget learns from all that was drafted meanwhile, and chooses again. A choice that
is like the one before holds for twice as many steps as that. No choice holds for more than MOST_HELD steps."""
LEAST_LEFT = 0.5
"""The share of its requests, and of those that draft, for which a choice holds on when the others have ended or may not
draft any more."""


@define
class Held:
    """What was chosen, and for what.

    numbers, limits: {request id: most draft tokens} that were chosen, and that the request might have.
    num_drafting: the number of requests that draft. is_beside: other proposers had drafts. is_informed: it was known
    how long drafts of these requests take. length: the number of steps for which it holds. num_left: how many are
    left, with the one that goes by it now.
    """

    numbers: dict[str, int]
    limits: dict[str, int]
    num_drafting: int
    is_beside: bool
    is_informed: bool
    length: int
    num_left: int

    @classmethod
    def of(
        cls,
        ids: Sequence[str],
        limits: Sequence[int],
        numbers: Sequence[int],
        *,
        is_beside: bool,
        is_informed: bool,
        least: int,
        before: Held | None,
    ) -> Held:
        """least: the number of steps for which it holds if the choice before, which is over now, was another one."""
        chosen, allowed = dict(zip(ids, numbers, strict=True)), dict(zip(ids, limits, strict=True))
        if before is not None and before._is_over_and_like(chosen):
            least = min(max(least, 2 * before.length), MOST_HELD)
        num_drafting = sum(map(bool, numbers))
        return cls(chosen, allowed, num_drafting, is_beside, is_informed, least, least)

    def take(
        self, ids: Sequence[str], limits: Sequence[int], *, is_beside: bool, is_informed: bool
    ) -> list[int] | None:
        """The numbers for a step's requests; None: it does not hold for these. Where a limit has grown, more draft
        tokens may pay. Beside drafts of other proposers, none pay that do not pay alone."""
        is_alike = not self.num_drafting if is_beside else not self.is_beside
        if self.num_left <= 1 or not is_alike or is_informed != self.is_informed:
            return None
        if len(ids) < LEAST_LEFT * len(self.numbers) or not all(
            limit <= self.limits.get(i, -1) for i, limit in zip(ids, limits, strict=True)
        ):
            return None
        numbers = [self.numbers[i] for i in ids]
        if len(ids) < len(self.numbers) and sum(map(bool, numbers)) < max(1, LEAST_LEFT * self.num_drafting):
            return None
        self.num_left -= 1
        return numbers

    def end_soon(self) -> None:
        """Note that other requests were tried: there is something to learn of them."""
        self.num_left = min(self.num_left, NUM_HELD)

    def _is_over_and_like(self, numbers: dict[str, int]) -> bool:
        """Whether its steps are over, and these numbers of draft tokens nearly its own. Not if it ended early: then
        there is little that could have been learned."""
        if self.num_left > 1:
            return False
        ours = [self.numbers.get(i, -1) for i in numbers]
        return all(bool(a) == bool(b) and abs(a - b) <= 1 for a, b in zip(ours, numbers.values(), strict=True))
