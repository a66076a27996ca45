"""Drafts from which the estimates of acceptance have still to learn."""

from __future__ import annotations

from specdec_core.budget.survival import Past, Survival
from specdec_core.contracts.proposer import RequestView

MOST_AWAITED = 8
"""Tokens that requests have to emit before the budget learns from what they drafted in shadow."""


class Unlearned:
    """Keeps drafts until they are learned from, all together; and the rows of requests that have ended since.

    Attributes: past, the drafts. ended, {id: request} of those that have ended.
    """

    def __init__(self, survival: Survival) -> None:
        self._survival = survival
        self.past: list[Past] = []
        self.ended: dict[str, RequestView] = {}
        self._known_at = 0  # the step when what has followed the last draft should be known

    def add(self, past: Past, step: int) -> None:
        self.past.append(past)
        self._known_at = step + MOST_AWAITED + 1

    def is_known(self, step: int) -> bool:
        """Whether there is something to learn though nothing else was drafted lately."""
        return bool(self.past) and step >= self._known_at

    def __bool__(self) -> bool:
        return bool(self.past or self.ended)

    def finish(self, request: RequestView, *, learns: bool) -> bool:
        """Note that a request has ended. Return whether no other goes on. learns: as in `Budget.finish`."""
        if learns:
            self.ended[request.id] = request
        else:
            self._survival.finish(request)
        is_last = len(self.ended) >= self._survival.num_requests
        if is_last and not learns:
            self.past = []
        return is_last

    def learn(self, step: int, *, lengths_vary: bool) -> bool:
        """Learn from the drafts of all requests since the last time, and free the rows of those that have ended. Return
        whether there were any drafts. lengths_vary: as in `Survival.learn`."""
        waiting = [each for each in self.past if each.has_shadows and self._waits(each)]
        past = [each for each in self.past if each not in waiting]
        self.past = waiting  # first: an interrupt must not make the drafts count twice
        if step >= self._known_at:  # what waits still, is asked for later
            self._known_at = step + MOST_AWAITED
        if past:
            self._survival.learn(past, lengths_vary=lengths_vary)
        for request in self.ended.values():
            self._survival.finish(request)
        self.ended.clear()
        return bool(past)

    def _waits(self, past: Past) -> bool:
        """Whether the text since a draft with shadows is still too short to learn much, and all its requests go on."""
        if any(request.id in self.ended or self._survival.group(request) < 0 for request in past.requests):
            return False
        pairs = zip(past.requests, past.num_tokens, strict=True)
        return min(len(request.token_ids) - number for request, number in pairs) <= min(
            past.draft.max_depth, MOST_AWAITED
        )
