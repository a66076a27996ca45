"""Remembers that none of a step's requests drafts, so that the next steps need not decide it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec_core.budget.cost_curve import CostCurve
from specdec_core.contracts.proposer import RequestView

SAME = 0.1
"""Costs that have changed by less than this share change no decision that nothing is drafted."""
NUM_MORE = 4
"""Draft tokens whose cost is compared."""
NUM_BESIDE = 32
"""Steps for which it holds that nothing is drafted beside other proposers' drafts, which change."""
LEAST_LEFT = 0.75
"""The share of the requests for which it holds when the others have ended. Beside other proposers' drafts it holds for
any: there, requests often end."""


class Idle:
    """For one proposer: which requests are off, and whether all of a step are.

    group_of: of a request. Its estimates begin as those of its group, so what was decided for one new request of a
        group holds for others, in a batch of the same size, until something is learned.
    """

    def __init__(self, curve: CostCurve, group_of: Callable[[RequestView], int]) -> None:
        self._curve, self._group_of = curve, group_of
        self._off: set[str] = set()  # ids of requests that do not draft
        self._judged: set[str] = set()  # ids of those about which was decided
        self._is_all_off = False
        self._requests: Sequence[RequestView] | None = None  # of a step in which all were off
        self._is_beside, self._num_left = False, 0  # if that is so beside other drafts only: for how many more steps
        self._size, self._decided_by = 0, curve.num_corrections  # their number then, and the costs
        self._costs = 0.0, 0.0
        self._new_off: set[tuple[int, int]] = set()  # groups and batch sizes: new requests like these are off

    @property
    def is_all_off(self) -> bool:
        """Whether none of the requests about which was decided last drafts."""
        return self._is_all_off

    def is_off(self, request: RequestView) -> bool:
        """A new request is not expected to draft either, while no other does."""
        return request.id in self._off or (self._is_all_off and request.id not in self._judged)

    def decide(self, requests: Sequence[RequestView], numbers: Sequence[int]) -> None:
        """numbers: of draft tokens; 0: the request does not draft."""
        for request, number in zip(requests, numbers, strict=True):
            if request.id not in self._judged:
                (self._new_off.discard if number else self._new_off.add)(self._kind(request, len(requests)))
            (self._off.discard if number else self._off.add)(request.id)
            self._judged.add(request.id)
        self._is_all_off = not any(numbers)

    def forget(self, request: RequestView) -> None:
        self._off.discard(request.id)
        self._judged.discard(request.id)
        if self._requests is not None:  # all others are still off; an ended request must not be kept alive
            self._requests = []

    def begin(self, requests: Sequence[RequestView], *, is_beside: bool = False) -> None:
        """Note that none of a step's requests drafts. is_beside: because other proposers have drafts for them."""
        self._requests, self._decided_by = list(requests), self._curve.num_corrections
        self._is_beside, self._num_left = is_beside, NUM_BESIDE
        self._size, self._costs = len(requests), self._costs_of(len(requests))

    def end(self) -> None:
        """Note that the proposer is asked again."""
        self._requests = None

    def learned(self) -> None:
        """Note that requests like those that are off may pay now."""
        self._new_off.clear()

    def goes_on(self, requests: Sequence[RequestView], *, is_prefill: bool, is_beside: bool = False) -> bool:
        """Whether it is already decided that none of these requests drafts: only the costs of a step may change that,
        or other requests. is_prefill: whether a prompt is read; a new request is decided on after that. is_beside:
        whether other proposers have drafts in this step. What does not pay without these does not pay beside them."""
        if self._requests is None:
            return False
        if self._is_beside:
            self._num_left -= is_beside
            if not is_beside or self._num_left < 0:
                return False
        if self._curve.num_corrections != self._decided_by:
            if self._is_cheaper():
                self._new_off.clear()
                return False
            self._decided_by = self._curve.num_corrections
        if requests == self._requests or (is_prefill and all(map(self.is_off, requests))):
            return True
        is_alike = self._is_beside or LEAST_LEFT * self._size <= len(requests) <= self._size
        if is_alike and all(request.id in self._off for request in requests):  # some have ended
            self._requests = list(requests)
            return True
        return not is_prefill and len(requests) == self._size and self._takes_over(requests)

    def _takes_over(self, requests: Sequence[RequestView]) -> bool:
        """Whether all of these requests are off, or new and like others that were. Then it is decided for them."""
        for request in requests:
            known = request.id in self._judged
            if request.id not in self._off if known else self._kind(request, len(requests)) not in self._new_off:
                return False
        self.decide(requests, [0] * len(requests))
        self._requests = list(requests)
        return True

    def _kind(self, request: RequestView, size: int) -> tuple[int, int]:
        return self._group_of(request), size

    def _is_cheaper(self) -> bool:
        """Whether drafts have become cheaper beside plain steps since it was decided. If they have become dearer, they
        still do not pay."""
        (plain_s, more), (plain_before_s, more_before) = self._costs_of(self._size), self._costs
        return plain_s > plain_before_s * (1 + SAME) or more < more_before * (1 - SAME)

    def _costs_of(self, number: int) -> tuple[float, float]:
        """The time of a plain step of so many requests, without the load, which slows down drafting, too; and that of a
        step with a few draft tokens, divided by it."""
        plain_s = self._curve.at(number)
        return plain_s / self._curve.load, self._curve.at(number, number + NUM_MORE) / plain_s
