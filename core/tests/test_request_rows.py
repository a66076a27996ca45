"""RequestRows assigns each request a row of a proposer's arrays, and no KeyboardInterrupt loses a row."""

from __future__ import annotations

import inspect
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from specdec_core import RequestRows, SpecdecError

NUM_ROWS = 3


def request_of(name: str) -> Any:
    return SimpleNamespace(id=name)


class FreeList(RequestRows):
    """RequestRows with a deliberate bug: it also keeps a list of free rows, so an interrupt between two changes can
    lose a row."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self._free = list(range(num_rows))

    def start(self, request: Any) -> int:
        if request.id not in self._rows:
            if not self._free:
                raise SpecdecError("all rows are taken")
            row = self._free.pop()
            self._rows[request.id] = row
        return self._rows[request.id]

    def finish(self, request: Any) -> None:
        row = self._rows.pop(request.id, None)
        if row is not None:
            self._free.append(row)


class Interrupt:
    """A trace function that raises KeyboardInterrupt before the n-th bytecode instruction of a call. Instructions of
    other packages, such as a callback of the garbage collector, do not count."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in (__file__, inspect.getfile(RequestRows)):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        return self


def broken_off(call: Any, number: int) -> None:
    before = sys.gettrace()
    sys.settrace(Interrupt(number))
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


calls = st.lists(
    st.tuples(st.sampled_from(["start", "finish"]), st.sampled_from("abcd"), st.none() | st.integers(1, 60)),
    max_size=30,
)


def check(rows: RequestRows, made: list[tuple[str, str, int | None]]) -> None:
    for kind, name, interrupted_at in made:
        request = request_of(name)
        if kind == "start" and rows.get(request) is None and len(taken(rows)) == NUM_ROWS:
            with pytest.raises(SpecdecError):
                rows.start(request)
        elif interrupted_at is not None:
            broken_off(lambda request=request, kind=kind: getattr(rows, kind)(request), interrupted_at)
        elif kind == "start":
            row = rows.start(request)
            assert row == rows.start(request) == rows.get(request)
            assert rows.of([request, request]) == [row, row]
        else:
            rows.finish(request)
            assert rows.get(request) is None
        assert len({*taken(rows)}) == len(taken(rows)), "two requests have one row"
        assert {*taken(rows)} <= {*range(NUM_ROWS)}
    for name in "abcd":
        rows.finish(request_of(name))
    assert {rows.start(request_of(name)) for name in "efg"} == {*range(NUM_ROWS)}, "a row was lost"


def taken(rows: RequestRows) -> list[int]:
    return [row for name in "abcd" if (row := rows.get(request_of(name))) is not None]


@settings(max_examples=200, deadline=None)
@given(made=calls)
def test_no_row_is_lost(made: list[tuple[str, str, int | None]]) -> None:
    check(RequestRows(NUM_ROWS), made)


def test_a_list_of_free_rows_loses_some() -> None:
    lost = 0
    for number in range(1, 60):
        try:
            check(FreeList(NUM_ROWS), [("start", "a", number), ("start", "b", None), ("finish", "b", number)])
        except (AssertionError, SpecdecError):
            lost += 1
    assert lost


def test_too_many_requests_are_refused() -> None:
    rows = RequestRows(1)
    rows.start(request_of("a"))
    with pytest.raises(SpecdecError, match="request 'b' starts, and all 1 rows are taken"):
        rows.start(request_of("b"))
