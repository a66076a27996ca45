"""Answers in pieces, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec_server.errors import ApiError
from specdec_server.json_text import dumps
from specdec_server.lifecycle import Lifecycle

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


class EventStream(Response):
    """A response of one event for each chunk, and a last one, `[DONE]`. The response begins with the first chunk, so an
    error before it has a status code of its own. A later error is an event.

    chunks: JSON texts.
    fields: of the request, for errors.
    """

    def __init__(self, lifecycle: Lifecycle, chunks: AsyncGenerator[bytes, None], fields: Collection[str]) -> None:
        super().__init__()
        self._lifecycle = lifecycle
        self._chunks = chunks
        self._fields = fields
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._lifecycle.run(receive, self._send_all(send))
        except ClientDisconnect:
            self.status_code = 499
        except Exception as error:
            failure = ApiError.of(error, self._fields)
            if not self._is_started:
                await failure.response(scope, receive, send)
                return
            await self._send(send, dumps(failure.body))
            await self._end(send)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                await self._send(send, chunk)
        await self._end(send)

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._is_started:
            self._is_started = True
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def _end(self, send: Send) -> None:
        await self._send(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b""})
