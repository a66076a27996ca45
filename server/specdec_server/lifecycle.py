"""A request's life: admitted or refused, run until it is complete, its client is gone or its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from attrs import define
from starlette.requests import ClientDisconnect

from specdec_core import AsyncLLM, SpecdecError
from specdec_server.errors import ApiError
from specdec_server.settings import Settings

T = TypeVar("T")

Receive = Callable[[], Awaitable[Mapping[str, Any]]]

RETRY_AFTER = {"Retry-After": "1"}
BODY_TIMEOUT_S = 30.0
"""Most seconds in which the body of a request has to arrive; the server's request_timeout, if that is less."""
SHUTTING_DOWN = "the server is shutting down: send the request to another one"


class Lifecycle:
    """Admits requests, and ends them when they have to.

    num_requests: requests that are being answered.
    is_draining: whether the server ends, and admits no more requests.
    """

    def __init__(self, llm: AsyncLLM, settings: Settings) -> None:
        self.num_requests = 0
        self.is_draining = False
        self._llm = llm
        self._most = llm.engine.max_num_seqs + settings.max_queued
        self._num_completions = 0
        self._timeout_s = settings.request_timeout_s
        self._drain_timeout_s = settings.drain_timeout_s
        self._receiving, self._running = set[_Limit](), set[_Limit]()
        self._has_ended = False
        self._fault = ""  # why requests fail; "": they do not

    def check(self) -> None:
        """Raise ApiError if the server can run no request: the engine hangs or has failed, or the server ends."""
        self._check_engine()
        if self._fault:
            raise self._stuck
        if self.is_draining or not self._llm.is_healthy:
            raise ApiError(503, SHUTTING_DOWN, code="shutting_down")

    def _check_engine(self) -> None:
        if self._llm.failure is not None:
            raise ApiError(500, str(self._llm.failure), code="engine_dead")

    @contextmanager
    def admit(self, num_completions: int) -> Iterator[None]:
        """A context in which so many completions of one request run or wait. Raises ApiError if there is no room, now
        or ever."""
        self.check()
        if num_completions > self._most:
            raise ApiError(
                400,
                f"the request asks for {num_completions} completions (prompts times n), and the server takes "
                f"{self._most} at once: send several requests",
            )
        if self._num_completions + num_completions > self._most:
            raise ApiError(
                429,
                f"{self._num_completions} completions run or wait, and the server takes {self._most} at once: try "
                f"again later",
                code="queue_full",
                headers=RETRY_AFTER,
            )
        self._num_completions += num_completions
        try:
            yield
        finally:
            self._num_completions -= num_completions

    async def receive_body(self, work: Coroutine[Any, Any, bytes]) -> bytes:
        """Wait for the body of a request. Raises ApiError if it takes too long, or if the server begins to drain."""
        timeout_s = min(BODY_TIMEOUT_S, self._timeout_s or BODY_TIMEOUT_S)
        late = ApiError(408, f"the body has not arrived within {timeout_s:g} s: send it faster", code="timeout")
        async with _limited(timeout_s, late, self._receiving):
            return await work

    async def run(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """Run the work of a request and return its result.

        Cancels it, and waits until it has ended, if the client disconnects (ClientDisconnect), after the server's
        request_timeout (ApiError 504), when the time to drain is over, and when the engine hangs (ApiError 503).

        receive: of the request, whose body has been read: the next message tells that the client is gone.
        """
        self.num_requests += 1
        late = ApiError(504, f"the request took longer than {self._timeout_s or 0:g} s: ask for less", code="timeout")
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            async with _limited(self._timeout_s, late, self._running) as limit:
                gone.add_done_callback(lambda _: limit.end(ClientDisconnect()))
                if self._fault:
                    limit.end(self._stuck)
                if self._has_ended:
                    limit.end(_cut_off())
                return await work
        except SpecdecError:
            self._check_engine()
            raise
        finally:
            gone.cancel()
            self.num_requests -= 1

    @property
    def _stuck(self) -> ApiError:
        return ApiError(503, self._fault, code="engine_stuck")

    def fail(self, fault: str) -> None:
        """End all requests with this message, and those that come, until `recover`."""
        self._fault = fault
        for limit in self._running:
            limit.end(self._stuck)

    def recover(self) -> None:
        """Take requests again after `fail`."""
        self._fault = ""

    def drain(self) -> None:
        """Admit no more requests, and end those that still run after the server's drain_timeout."""
        self.is_draining = True
        for limit in self._receiving:
            limit.end(ApiError(503, SHUTTING_DOWN, code="shutting_down"))
        asyncio.get_running_loop().call_later(self._drain_timeout_s, self.end)

    def end(self) -> None:
        """End the requests that still run."""
        self._has_ended = True
        for limit in self._running:
            limit.end(_cut_off())


@define(eq=False)
class _Limit:
    """Ends the work in a context of `_limited`. error: what the context then raises."""

    timeout: asyncio.Timeout
    error: Exception
    is_over: bool = False  # the context has ended

    def end(self, error: Exception) -> None:
        """End the work at the next turn of the event loop, if it has not ended."""
        if not self.is_over and not self.timeout.expired():
            self.error = error
            self.timeout.reschedule(asyncio.get_running_loop().time())


@asynccontextmanager
async def _limited(timeout_s: float | None, late: Exception, limits: set[_Limit]) -> AsyncIterator[_Limit]:
    """A context whose work is cancelled after some time, when it raises `late`, or by `_Limit.end`. Meanwhile the limit
    is one of limits."""
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            limit = _Limit(timeout, late)
            limits.add(limit)
            try:
                yield limit
            finally:
                limits.remove(limit)
                limit.is_over = True
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise limit.error from error


def _cut_off() -> ApiError:
    return ApiError(503, "the server shut down before the request was complete", code="shutting_down")


async def _disconnect(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
