"""Interrupts (Ctrl-C) of a training run, of which none is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from attrs import define


@define
class Interrupts:
    """Remembers whether the run was interrupted.

    Python discards exceptions in `__del__` and in callbacks of the garbage collector, and a KeyboardInterrupt with
    them. So the run calls `check` in every step.
    """

    has_come: bool = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if the run was interrupted."""
        if self.has_come:
            raise KeyboardInterrupt


@contextmanager
def noticing() -> Iterator[Interrupts]:
    """Remember interrupts during the `with` block, and raise KeyboardInterrupt at its end if one was discarded. An
    interrupt still raises KeyboardInterrupt at once where Python lets it.

    Where the process handles SIGINT in a way of its own, or in another thread than the main one, nothing changes.
    """
    interrupts = Interrupts()

    def handle(number: int, frame: FrameType | None) -> None:
        interrupts.has_come = True
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupts
        interrupts.check()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
