"""The process of a rank other than 0: repeats rank 0's commands until that ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from time import sleep

LOOKS_EVERY_S = 0.5


def main() -> None:
    """Run a rank. The arguments of the process are its rank, the number of ranks, the pipe to rank 0 and rank 0's
    process id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, size, pipe, parent = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection, status = Connection(pipe), 1
    try:
        _serve(rank, size, connection)
    except EOFError:
        status = 0
    except BaseException as error:
        with suppress(OSError):
            connection.send(_report(error))
    os._exit(status)  # the other ranks are not waited for


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, also in the middle of an exchange."""
    while os.getppid() == parent:
        sleep(LOOKS_EVERY_S)
    os._exit(1)


def _serve(rank: int, size: int, connection: Connection) -> None:
    import torch
    from transformers.utils import logging

    from specdec_core.ranks.commands import Commands
    from specdec_core.ranks.messages import Sum, receive

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # rank 0 says the same
    received = Sum()
    commands = Commands(rank, size, received)
    with torch.inference_mode():
        while True:
            for name, args in receive(connection, received):
                answer = getattr(commands, name)(*args)
            if name == "ask":
                connection.send(("answer", answer))


def _report(error: BaseException) -> tuple[str, str]:
    """What rank 0 gets to know of an exception: its kind ("lost" if another rank ended first) and its text."""
    from specdec_core.ranks.group import is_lost
    from specdec_core.ranks.messages import described

    return "lost" if is_lost(error) else "error", described(error)
