"""A progress indicator for operations that take seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

SECONDS = 2.0
"""Between two signs of life."""


@contextmanager
def working(console: Console, doing: str) -> Iterator[None]:
    """Show a description of what a `with` block does, until the block ends.

    doing: the description. A terminal with colors also shows a spinner. Elsewhere a dot is printed every two seconds.
    """
    if console.is_terminal and console.color_system:
        with console.status(Text(doing), refresh_per_second=2):  # each refresh takes time from what is measured
            yield
        return
    ended = Event()
    console.out(doing, end=" ")

    def print_dots() -> None:
        while not ended.wait(SECONDS):
            try:
                console.file.write(".")
                console.file.flush()
            except OSError:  # a closed pipe: the main thread finds out when it prints
                return

    thread = Thread(target=print_dots, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        console.out("")
