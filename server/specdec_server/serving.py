"""Runs the application with uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType

import click
import uvicorn
from starlette.applications import Starlette

from specdec_core import AsyncLLM, ConfigError
from specdec_server.settings import Settings
from specdec_server.watchdog import Watchdog

BACKLOG = 2048
"""Connections that may wait to be accepted."""
LAST_RESORT_S = 5
"""After the time to drain, requests fail by themselves. uvicorn cuts those that do not after this many seconds more."""


class DrainingServer(uvicorn.Server):
    """A uvicorn server that lets the application drain before it ends. A second Ctrl-C ends the requests that are left,
    a third one the server, without an answer to them.

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
        self._is_hurried = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT and self._loop is not None and not self._is_hurried:
            self._is_hurried = True
            self._loop.call_soon_threadsafe(self._lifecycle.end)
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._is_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._lifecycle.drain()
        await super().shutdown(sockets)


def end_engine(llm: AsyncLLM, watchdog: Watchdog) -> None:
    """Shut the engine down. If it hangs, end the process with status 1 instead, since its thread never returns."""
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(asyncio.run, llm.shutdown())
        while not wait((ending,), timeout=watchdog.interval_s).done:
            if watchdog.look():
                click.echo("error: the engine hangs, so the process ends without closing it", err=True)
                sys.stderr.flush()
                os._exit(1)
        ending.result()


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
