"""What every request passes through: the access log and the check of keys."""

from __future__ import annotations

import hmac
import json
import logging
from time import perf_counter, time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec_server.errors import ApiError

access_logger = logging.getLogger("specdec_server.access")

OPEN = ("/", "/health", "/load", "/metrics", "/version")
"""Paths that need no key: the front page, which asks for one, and what probes and Prometheus read."""

CLIENT_GONE = 499


class AccessLog:
    """Logs each request in a line of JSON, when its answer is complete. Bodies are not logged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, num_bytes, is_complete, started = 0, 0, False, perf_counter()

        async def counting(message: Message) -> None:
            nonlocal status, num_bytes, is_complete
            await send(message)
            status = message.get("status", status)
            num_bytes += len(message.get("body", b""))
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, counting)
        finally:
            line = {
                "time": round(time(), 3),
                "client": scope["client"][0] if scope.get("client") else None,
                "method": scope["method"],
                "path": scope["path"],
                "status": status if is_complete else CLIENT_GONE,
                "bytes": num_bytes,
                "seconds": round(perf_counter() - started, 4),
            }
            access_logger.info("%s", json.dumps(line))


class KeyCheck:
    """Refuses requests without one of the server's keys, except those of `OPEN`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            # Each key is compared, in a time that does not depend on where it differs.
            matches = [hmac.compare_digest(key, given.encode()) for key in self._keys]
            if scheme.lower() != "bearer" or not any(matches):
                message = "the key is missing or wrong: send the header 'Authorization: Bearer KEY'"
                await ApiError(401, message, code="invalid_api_key").response(scope, receive, send)
                return
        await self._app(scope, receive, send)
