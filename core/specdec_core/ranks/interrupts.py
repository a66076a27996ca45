"""Interrupts (Ctrl-C) that wait until ranks are in step again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def later_interrupts(give_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A context in which Ctrl-C is only noted; it is raised when the context ends. Python interrupts the main thread
    alone, so in other threads there is nothing to do.

    give_up: called at a second Ctrl-C: lets the context end, whatever it waits for.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        if len(noted) > 1:
            give_up()

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted:
            signal.raise_signal(signal.SIGINT)
