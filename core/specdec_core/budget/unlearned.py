"""Drafts from which the estimates of acceptance have still to learn."""

from __future__ import annotations

from specdec_core.budget.survival import Past, Survival
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import RequestView

MOST_AWAITED = 8
"""Tokens that requests have to emit before the budget learns from what they drafted in shadow."""


class Unlearned:
    """Keeps drafts until `Survival` learns from all of them at once, and the requests that have ended since then.

    Attributes: past, the drafts to learn from. waiting, drafts in shadow whose requests have not emitted enough tokens
    yet. ended, {id: request} of those that have ended.
    """

    def __init__(self, survival: Survival) -> None:
        self._survival = survival
        self.past: list[Past] = []
        self.waiting: list[Past] = []
        self.ended: dict[str, RequestView] = {}

    def __bool__(self) -> bool:
        return bool(self.past or self.waiting or self.ended)

    def add(self, past: Past) -> None:
        (self.waiting if past.has_shadows else self.past).append(past)

    def finish(self, request: RequestView, *, learns: bool) -> bool:
        """Note that a request has ended. Return whether no other goes on. learns: as in `Budget.finish`."""
        if learns:
            self.ended[request.id] = request
        else:
            self._survival.finish(request)
        is_last = len(self.ended) >= self._survival.num_requests
        if is_last and not learns:
            self.past, self.waiting = [], []
        return is_last

    def settle(self) -> list[tuple[Draft, int]]:
        """Move drafts in shadow to `past` if their requests have emitted enough tokens or ended. Return them, and how
        many draft tokens of each would have been accepted."""
        known = [each for each in self.waiting if not self._num_awaited(each)]
        self.waiting = [each for each in self.waiting if each not in known]
        self.past += known
        return [(each.draft, self._survival.num_accepted(each)) for each in known]

    def learn(self) -> None:
        """Learn from `past`, and free the rows of the requests that have ended. Call `settle` first: nothing could
        be learned later of a draft that waits for an ended request."""
        past, self.past = self.past, []  # first: an interrupt must not make the drafts count twice
        if past:
            self._survival.learn(past)
        for request in self.ended.values():
            self._survival.finish(request)
        self.ended.clear()

    @property
    def num_awaited(self) -> int | None:
        """How many tokens each request has still to emit until the text shows which draft tokens in shadow are right.
        0: it is long enough. None: nothing was drafted in shadow."""
        return min(map(self._num_awaited, self.waiting), default=None)

    def _num_awaited(self, past: Past) -> int:
        """0 if one of its requests has ended: no more text follows."""
        if any(request.id in self.ended or self._survival.group(request) < 0 for request in past.requests):
            return 0
        pairs = zip(past.requests, past.num_tokens, strict=True)
        num_emitted = min(len(request.token_ids) - number for request, number in pairs)
        return max(0, min(past.draft.max_depth, MOST_AWAITED) + 1 - num_emitted)
