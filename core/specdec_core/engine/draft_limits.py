"""Decides how many draft tokens each request may have in a step."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from specdec_core.engine.request import Request


@frozen
class DraftLimit:
    """Decides how many draft tokens each request may have in a step that has room for all (`max_draft_tokens`).

    num_speculative_tokens: the engine's setting, 0 without a proposer.
    disable_by_batch_size: no request drafts while more requests than this are running; None: no such limit.
    max_model_len: the longest request that the proposers draft for, in tokens; None: no such limit.
    """

    num_speculative_tokens: int
    disable_by_batch_size: int | None = None
    max_model_len: int | None = None

    def __call__(self, request: Request, num_running: int) -> int:
        """The most draft tokens that a request may have in this step, decided before drafting.

        A step emits the accepted draft tokens and one more token. So the number of draft tokens stays below the number
        of tokens left until max_total_tokens. A request's first forward pass has no draft tokens, since there are no
        hidden states to draft from yet.
        """
        has_run = request.num_computed > request.num_cached_tokens
        if request.num_pending != 1 or not has_run or not request.may_draft or not request.params.asks_for_drafts:
            return 0
        if self.disable_by_batch_size is not None and num_running > self.disable_by_batch_size:
            return 0
        asked = request.params.num_speculative_tokens
        wanted = self.num_speculative_tokens if asked is None else asked
        room = request.max_total_tokens - request.num_tokens - 1
        if self.max_model_len is not None:
            room = min(room, max(0, self.max_model_len - request.num_tokens))
        return min(wanted, room)


def deal(wanted: Sequence[int], room: int) -> list[int]:
    """Deal out `room` draft tokens evenly: no request gets more than it wants, and of those that get less than they
    want, none gets two more than another. Tokens that do not divide evenly go to the first of these.

    wanted: [requests], the most draft tokens of each. Returns the draft tokens of each.
    """
    shares = [0] * len(wanted)
    modest_first = sorted(range(len(wanted)), key=lambda i: (wanted[i], -i))
    for num_left, i in zip(range(len(wanted), 0, -1), modest_first, strict=True):
        shares[i] = min(wanted[i], room // num_left)
        room -= shares[i]
    return shares
