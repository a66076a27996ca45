"""How requests arrive: a fixed number of users, each of which sends the next request when the last one is answered, or
a rate of arrivals that does not wait for answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from math import inf
from random import Random
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from specdec_core.config.sampling import SamplingParams

if TYPE_CHECKING:
    from specdec_core.engine.engine import Engine
    from specdec_core.engine.request import Piece, Request

LONGEST_WAIT_S = 3600.0
"""At a time: the system's clock has a limit."""


class Load(Protocol):
    """When each of several requests arrives."""

    @property
    def title(self) -> str:
        """Name of the load, for a row of a table."""

    @property
    def settings(self) -> dict[str, Any]:
        """The load as an option of the command and its value, for the JSON."""

    def next_arrival(self, index: int, num_unfinished: int, now: float) -> float:
        """Return the time in seconds at which request `index` arrives, or infinity: only after another one has ended.

        num_unfinished: how many of the requests that have arrived are not answered yet.
        now: seconds since the start.
        """


@frozen
class Users:
    """A number of users. Each sends a request at once, and the next one as soon as its request is answered."""

    number: int

    @property
    def title(self) -> str:
        return f"{self.number} at once"

    @property
    def settings(self) -> dict[str, Any]:
        return {"concurrency": self.number}

    def next_arrival(self, index: int, num_unfinished: int, now: float) -> float:
        return now if num_unfinished < self.number else inf


@frozen(slots=False)
class Rate:
    """Requests that arrive at random, `per_s` each second on average (a Poisson process), whether or not earlier ones
    are answered. The times depend only on the rate, the number of requests and the seed."""

    per_s: float
    num_requests: int
    seed: int

    @property
    def title(self) -> str:
        return f"{self.per_s:g}/s"

    @property
    def settings(self) -> dict[str, Any]:
        return {"request_rate": self.per_s}

    @cached_property
    def arrivals_s(self) -> tuple[float, ...]:
        random = Random(self.seed)
        return tuple(accumulate(random.expovariate(self.per_s) for _ in range(self.num_requests)))

    def next_arrival(self, index: int, num_unfinished: int, now: float) -> float:
        return self.arrivals_s[index]


@frozen
class Served:
    """Requests that an engine has answered, in the order in which they arrived.

    started: the clock's time at the start.
    seconds: from the start to the last token.
    idle_s: the part of it in which no request was unfinished.
    arrivals_s: seconds from the start to the arrival of each request. One that arrives during a step has to wait for
        the step to end, and this wait counts as its own.
    """

    requests: tuple[Request, ...]
    started: float
    seconds: float
    idle_s: float
    arrivals_s: tuple[float, ...]


def serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    load: Load,
    *,
    clock: Callable[[], float] = perf_counter,
    wait: Callable[[float], None] = sleep,
) -> Served:
    """Let requests arrive and run the engine until all are answered.

    prompts: token ids of each request, in the order of arrival.
    clock, wait: measure and pass time in seconds.
    """
    ids: list[str] = []
    arrivals_s: list[float] = []
    ended: dict[str, Request] = {}
    idle_s = 0.0

    def listen(request: Request, pieces: Sequence[Piece]) -> None:
        if request.finish_reason is not None:
            ended[request.id] = request

    started = clock()
    try:
        while len(ended) < len(prompts):
            now = clock() - started
            arrival = inf
            while len(ids) < len(prompts):
                arrival = load.next_arrival(len(ids), len(ids) - len(ended), now)
                if arrival > now:
                    break
                arrivals_s.append(arrival)
                ids.append(engine.add_request(prompts[len(ids)], params, listen))
            if engine.has_unfinished:
                engine.step()
            else:
                wait(min(arrival - now, LONGEST_WAIT_S))
                idle_s += clock() - started - now
        seconds = clock() - started
    finally:
        engine.cancel(*ids)
    return Served(tuple(ended[each] for each in ids), started, seconds, idle_s, tuple(arrivals_s))
