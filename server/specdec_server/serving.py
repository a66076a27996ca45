"""Runs the application with uvicorn until a signal ends it."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from specdec_core import ConfigError
from specdec_server.settings import Settings

BACKLOG = 2048
"""Connections that may wait to be accepted."""
LAST_RESORT_S = 5
"""After the time to drain, requests fail by themselves. uvicorn cuts those that do not after this many seconds more."""


class DrainingServer(uvicorn.Server):
    """A uvicorn server that lets the application drain before it ends.

    is_ready: called when requests are accepted.
    """

    def __init__(self, app: Starlette, settings: Settings, is_ready: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            app,
            access_log=False,
            log_level="warning",
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=int(settings.drain_timeout_s) + LAST_RESORT_S,
        )
        super().__init__(config)
        self._lifecycle = app.state.service.lifecycle
        self._is_ready = is_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._is_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._lifecycle.drain()
        await super().shutdown(sockets)


def bound_socket(host: str, port: int) -> socket.socket:
    """Make a socket that listens, so that a port in use is noticed before the model is loaded. Clients that connect
    meanwhile wait. Raises ConfigError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise ConfigError(f"{host}:{port} cannot be listened at ({error.strerror}): give another --port") from error
    return found
