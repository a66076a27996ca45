"""Assigns rows of an array to requests, for proposers that keep one array or tensor for all requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from specdec_core.contracts.proposer import RequestView
from specdec_core.errors import SpecdecError
from specdec_core.ops.upload import upload


class RequestRows:
    """Assigns to each request a row of a proposer's arrays or tensors.

    The only state is a dict from request ids to rows; free rows are computed from it. So if an interrupt breaks off a
    call, no row is lost.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows: dict[str, int] = {}  # by request id

    def start(self, request: RequestView) -> int:
        """Return the request's row; a new request is assigned the lowest free row. Raises SpecdecError if all rows are
        taken."""
        if request.id not in self._rows:
            taken = set(self._rows.values())
            free = next((row for row in range(self._num_rows) if row not in taken), None)
            if free is None:
                raise SpecdecError(
                    f"request {request.id!r} starts, and all {self._num_rows} rows are taken: finish another one "
                    f"first, or have as many rows as the build context's max_num_seqs"
                )
            self._rows[request.id] = free
        return self._rows[request.id]

    def finish(self, request: RequestView) -> None:
        """Free the request's row. A request without a row is ignored."""
        self._rows.pop(request.id, None)

    def __len__(self) -> int:
        """The number of requests that have a row."""
        return len(self._rows)

    def get(self, request: RequestView) -> int | None:
        """The request's row; None if it has no row."""
        return self._rows.get(request.id)

    def of(self, requests: Iterable[RequestView]) -> list[int]:
        """Return the rows of these requests, in order. Every request must have a row already."""
        return [self._rows[request.id] for request in requests]


class RequestTensors(RequestRows):
    """Tensors with one row for each request, such as the hidden states of its last token.

    widths: the width of each tensor. All are [num_rows, width].
    """

    def __init__(self, num_rows: int, widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(num_rows)
        self._tensors = [torch.zeros(num_rows, width, dtype=dtype, device=device) for width in widths]

    def put(self, requests: Iterable[RequestView], *values: torch.Tensor) -> None:
        """Store the requests' rows: for each tensor float [num_requests, width]."""
        rows = self._indices(requests)
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.index_copy_(0, rows, value)

    def take(self, requests: Iterable[RequestView]) -> list[torch.Tensor]:
        """Return a copy of the requests' rows: of each tensor float [num_requests, width]."""
        rows = self._indices(requests)
        return [tensor.index_select(0, rows) for tensor in self._tensors]

    def _indices(self, requests: Iterable[RequestView]) -> torch.Tensor:
        return upload(self.of(requests), self._tensors[0].device, dtype=torch.int64)
