"""Ending things completely although an interrupt (Ctrl-C) may come at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def then(callback: Callable[[], object]) -> Iterator[None]:
    """A context that calls `callback` at its end, also if it raises an Exception. After an interrupt it does not, since
    the engine runs what was interrupted again."""
    try:
        yield
    except Exception:
        callback()
        raise
    callback()
