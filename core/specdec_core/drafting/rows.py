"""Rows of what a proposer keeps for all requests together."""

from __future__ import annotations

from collections.abc import Iterable

from specdec_core.contracts.proposer import RequestView
from specdec_core.errors import SpecdecError


class RequestRows:
    """Which row of an array or a tensor is which request's, for proposers that keep one for all of them.

    One dict says which rows are taken, and nothing else which are free. So an interrupt that breaks off a call loses no
    row: the request has it, and its next call finds it again, or has none.
    """

    def __init__(self, num_rows: int) -> None:
        self._all = frozenset(range(num_rows))
        self._rows: dict[str, int] = {}  # by request id

    def start(self, request: RequestView) -> int:
        """The lowest row that is free, or the one that the request has. Raises SpecdecError if all are taken."""
        if request.id not in self._rows:
            free = self._all.difference(self._rows.values())
            if not free:
                raise SpecdecError(
                    f"request {request.id!r} starts, and all {len(self._all)} rows are taken: finish another one "
                    f"first, or have as many rows as the build context's max_num_seqs"
                )
            self._rows[request.id] = min(free)
        return self._rows[request.id]

    def finish(self, request: RequestView) -> None:
        """Free the request's row. A request that has none is ignored."""
        self._rows.pop(request.id, None)

    def get(self, request: RequestView) -> int | None:
        """The request's row; None if it has none."""
        return self._rows.get(request.id)

    def of(self, requests: Iterable[RequestView]) -> list[int]:
        """The row of each request, all of which have one."""
        return [self._rows[request.id] for request in requests]
