"""How requests arrive: users who wait for their answer, and a rate. The clock and the engine are pretended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specdec_core import SamplingParams
from specdec_tools.loads import LONGEST_WAIT_S, Rate, Users, serve

PARAMS = SamplingParams(max_tokens=2)


class PretendedEngine:
    """A step takes a second and gives each request a token. A request ends after as many tokens as its prompt has."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waited: list[float] = []
        self.running: dict[str, tuple[SimpleNamespace, object]] = {}
        self.arrived_at: list[float] = []
        self.batches: list[int] = []
        self.cancelled: tuple[str, ...] = ()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def add_request(self, prompt, params, listener):
        assert params is PARAMS
        request = SimpleNamespace(id=f"r{len(self.arrived_at)}", left=len(prompt), finish_reason=None)
        self.running[request.id] = (request, listener)
        self.arrived_at.append(self.now)
        return request.id

    def step(self) -> None:
        self.now += 1
        self.batches.append(len(self.running))
        for request, listener in [*self.running.values()]:
            request.left -= 1
            if not request.left:
                request.finish_reason = "length"
                del self.running[request.id]
            listener(request, ())

    def cancel(self, *request_ids: str) -> None:
        self.cancelled = request_ids

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds


def served(engine: PretendedEngine, lengths: list[int], load):
    return serve(engine, [[1] * n for n in lengths], PARAMS, load, clock=lambda: engine.now, wait=engine.wait)


def test_users_send_the_next_request_when_one_is_answered() -> None:
    """Two users: requests of 2 and 3 steps at once, the third after 2 steps, the fourth after 3."""
    engine = PretendedEngine()
    found = served(engine, [2, 3, 1, 1], Users(2))
    assert found.arrivals_s == (0.0, 0.0, 2.0, 3.0)
    assert engine.batches == [2, 2, 2, 1]
    assert (found.started, found.seconds, found.idle_s) == (100.0, 4.0, 0.0)
    assert [request.id for request in found.requests] == ["r0", "r1", "r2", "r3"]


def test_a_rate_does_not_wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests at 0.5, 0.75 and 9 s. The second one arrives during the first step and is seen after it, but counts from
    its arrival. Before the first and the third one the engine has nothing to do."""
    load = Rate(1.0, 3, seed=0)
    load.__dict__["arrivals_s"] = (0.5, 0.75, 9.0)
    engine = PretendedEngine()
    found = served(engine, [2, 2, 1], load)
    assert found.arrivals_s == (0.5, 0.75, 9.0)
    assert engine.arrived_at == [100.5, 101.5, 109.0]
    assert engine.waited == [0.5, 5.5]
    assert (found.seconds, found.idle_s) == (10.0, 6.0)


def test_a_long_wait_is_divided() -> None:
    load = Rate(1.0, 1, seed=0)
    load.__dict__["arrivals_s"] = (2.5 * LONGEST_WAIT_S,)
    engine = PretendedEngine()
    assert served(engine, [1], load).arrivals_s == (2.5 * LONGEST_WAIT_S,)
    assert engine.waited == [LONGEST_WAIT_S, LONGEST_WAIT_S, LONGEST_WAIT_S / 2]


def test_arrivals_are_a_poisson_process_with_a_seed() -> None:
    """The mean gap is the reciprocal of the rate, and so is the standard deviation of the gaps."""
    arrivals = Rate(4.0, 20_000, seed=3).arrivals_s
    gaps = [b - a for a, b in zip((0.0, *arrivals), arrivals, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.03)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(0.25, rel=0.03)
    assert Rate(4.0, 20_000, seed=3).arrivals_s == arrivals
    assert Rate(4.0, 20_000, seed=4).arrivals_s != arrivals


def test_an_error_cancels_what_runs() -> None:
    engine = PretendedEngine()
    engine.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        served(engine, [2, 2, 2], Users(2))
    assert engine.cancelled == ("r0", "r1")


def test_titles_and_settings() -> None:
    assert (Users(4).title, Users(4).settings) == ("4 at once", {"concurrency": 4})
    assert (Rate(2.5, 1, 0).title, Rate(2.5, 1, 0).settings) == ("2.5/s", {"request_rate": 2.5})
