"""Carries output from the engine's thread to the asynchronous generators of `AsyncLLM`."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Queue
from collections.abc import Iterator, Sequence
from math import inf

from attrs import define, field

from specdec_core.api.outputs import StreamOutput
from specdec_core.engine.request import Piece, Request
from specdec_core.errors import SpecdecError


@define
class _Held:
    """Tokens of one completion that were not sent yet.

    due_s: when they are sent if the completion goes on, in seconds of `perf_counter`.
    is_last: whether the completion has ended with them. Requests that an error ends have no last tokens.
    """

    prompt_index: int
    index: int
    request: Request
    pieces: list[Piece] = field(factory=list)
    due_s: float = -inf
    is_last: bool = False

    def take(self) -> StreamOutput:
        pieces, self.pieces = self.pieces, []
        return StreamOutput.of(self.prompt_index, self.index, self.request, pieces)


class Stream:
    """The completions of one generator. The engine's thread calls all methods.

    interval_s: between an output and the next one of the same completion; inf: yield whole completions.
    due_s: when the next output is to be sent, in seconds of `perf_counter`; inf: there is nothing to send.
    running: ids of the generator's requests that have not ended.
    error: the exception that the generator raises after its last output; None: it ends normally.
    """

    def __init__(self, loop: AbstractEventLoop, interval_s: float) -> None:
        self.loop, self._interval_s = loop, interval_s
        self.is_streamed = interval_s < inf
        self.due_s = inf
        self.queue: Queue[StreamOutput | None] = Queue()
        self.error: BaseException | None = None
        self.running: set[str] = set()
        self._held: dict[str, _Held] = {}

    def add(self, prompt_index: int, index: int, request: Request, pieces: Sequence[Piece]) -> None:
        """Hold the tokens that a step added to a completion. A `SampleListener`."""
        held = self._held.get(request.id)
        if held is None:
            due_s = -inf if self.is_streamed else inf
            held = self._held[request.id] = _Held(prompt_index, index, request, due_s=due_s)
        held.pieces += pieces
        held.is_last = request.finish_reason is not None
        self.due_s = min(self.due_s, -inf if held.is_last else held.due_s)

    def take_due(self, now_s: float) -> Iterator[StreamOutput]:
        """The outputs that are to be sent now: of completions that have ended, and of those with new tokens whose last
        output was sent long enough ago."""
        self.due_s = inf
        for held in list(self._held.values()):
            if held.is_last:
                del self._held[held.request.id]
                self.running.remove(held.request.id)
                yield held.take()
            elif held.pieces and held.due_s <= now_s:
                held.due_s = now_s + self._interval_s
                yield held.take()
            elif held.pieces:
                self.due_s = min(self.due_s, held.due_s)

    def end(self, error: BaseException | None) -> None:
        """End the generator. An exception that would end the event loop, too, becomes a SpecdecError."""
        if error is not None and not isinstance(error, Exception):
            reason, error = error, SpecdecError(f"{type(error).__name__} in the engine's thread ended the request")
            error.__cause__ = reason
        self.error = error  # before the generator is told that it ends
        send(self.loop, [(self, None)])


def send(loop: AbstractEventLoop, outputs: Sequence[tuple[Stream, StreamOutput | None]]) -> bool:
    """Send outputs to the generators of an event loop in one call, since each wakes the loop; None ends a generator.
    Returns False if the loop is closed."""

    def put() -> None:
        for stream, output in outputs:
            stream.queue.put_nowait(output)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:  # the loop is closed
        return False
    return True
