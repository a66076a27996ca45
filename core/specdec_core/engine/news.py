"""Collects requests' new output until the engine calls their listeners (callbacks that receive the output)."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core.engine.request import Listener, Piece, Request


class News:
    """Collects requests' new output until the engine calls their listeners. A listener gets one call per request, with
    all its new pieces (output tokens with their text). There is no call after the one that reports the request's
    end.

    Requests do not refer to their listeners, which may refer to the engine: a proposer may keep requests, and would
    keep an engine alive that was dropped.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, Listener] = {}  # by request id
        self._pieces: dict[str, tuple[Request, Sequence[Piece]]] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    def listen(self, request_id: str, listener: Listener) -> None:
        self._listeners[request_id] = listener

    def add(self, request: Request, pieces: Sequence[Piece]) -> None:
        request.num_streamed += sum(len(piece.text) for piece in pieces)
        if request.id in self._pieces:
            pieces = [*self._pieces[request.id][1], *pieces]
        self._pieces[request.id] = request, pieces

    def tell(self) -> None:
        """Call the listeners of all requests with new output. If a listener raises an error, the next call of `tell`
        calls the remaining listeners."""
        while self._pieces:
            request, pieces = self._pieces.pop(next(iter(self._pieces)))
            listener = self._listeners.get(request.id)
            if request.finish_reason is not None:
                self._listeners.pop(request.id, None)
            if listener is not None:
                listener(request, pieces)
