"""Recognizes requests by their tokens in the rows of a batch, which have no request ids.

A row continues a request if the row's tokens without the new ones are the request's tokens, all of them. So a row never
gets the state of a request with another text. Requests of equal text may change places: their states are equal, too. A
request that comes back looks like a new one whose prompt is, token for token, the text of one that has just ended; this
one continues it, which may cost accepted tokens and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Protocol

import numpy as np

from specdec_core import RequestView, TokenRequest

MOST_AWAY = 32
"""How many requests without a row are remembered: they may have ended or be preempted. A preempted one that is
forgotten begins anew, which may cost accepted tokens and nothing else."""


class Drafter(Protocol):
    """What hears of requests, such as a `TokenDrafter`."""

    def start(self, request: RequestView) -> None: ...
    def finish(self, request: RequestView, reason: str) -> None: ...


class Rows:
    """The requests in the rows of a batch.

    may_miss_a_step: set it before a call of `read` if steps may have passed since the last one, whose tokens were not
        read. A row may then have grown by any number of tokens.
    """

    def __init__(self, num_rows: int) -> None:
        self.most_requests = num_rows + MOST_AWAY  # that have started and not finished
        self.may_miss_a_step = False
        self._of_rows: dict[int, TokenRequest] = {}
        self._away: list[TokenRequest] = []  # the one that left its row last stands last
        self._ids = count()

    def read(self, texts: Sequence[np.ndarray], num_new: Sequence[int], drafter: Drafter) -> list[TokenRequest | None]:
        """Return the request of each row, with the row's tokens; None if the row has no new tokens. Starts requests
        that are new, and finishes those that have been away for longest.

        texts: integers [num_tokens] of each row, the new ones included. They are copied.
        num_new: how many of a row's last tokens are new. 0: its prompt is still being computed.
        """
        before = self._of_rows
        rows = [*enumerate(zip(texts, num_new, strict=True))]
        kept = {
            row: before[row]
            for row, (text, new) in rows
            if row in before and len(before[row].token_ids) == len(text) - new and _begins(text, before[row])
        }
        away = self._away + [request for row, request in before.items() if row not in kept]
        for row, (text, new) in rows if away else ():
            if row not in kept and (request := self._find(away, text, len(text) - new, before.get(row))):
                kept[row] = request
                away.remove(request)
        self._of_rows, self._away = kept, away[-MOST_AWAY:]
        _finish(away[:-MOST_AWAY], drafter)
        found: list[TokenRequest | None] = [None] * len(texts)
        for row, (text, new) in rows:
            if not new:
                continue
            request = kept.get(row)
            if request is None:
                request = kept[row] = TokenRequest(f"row-{next(self._ids)}", text[: len(text) - new].tolist())
                drafter.start(request)
            request.append(text[len(request.token_ids) :])
            found[row] = request
        return found

    def clear(self, drafter: Drafter) -> None:
        """Finish all requests."""
        _finish([*self._away, *self._of_rows.values()], drafter)
        self._of_rows, self._away = {}, []

    def _find(
        self, away: Sequence[TokenRequest], text: np.ndarray, num_old: int, of_row: TokenRequest | None
    ) -> TokenRequest | None:
        """The request that a row continues: the longest, and of equal ones the one that had the row, or has left its
        row last. num_old: the row's tokens without the new ones. of_row: the request that had the row."""
        least = 1 if self.may_miss_a_step else num_old
        fitting = [r for r in reversed(away) if least <= len(r.token_ids) <= num_old and _begins(text, r)]
        return max(fitting, key=lambda request: (len(request.token_ids), request is of_row), default=None)


def _begins(text: np.ndarray, request: TokenRequest) -> bool:
    """Whether a text, which is not shorter, begins with a request's tokens."""
    tokens = request.token_ids
    last = len(tokens) - 1
    return bool(tokens[last] == text[last]) and bool((tokens == text[: last + 1]).all())  # most others differ there


def _finish(requests: Iterable[TokenRequest], drafter: Drafter) -> None:
    for request in requests:
        drafter.finish(request, "stop")
