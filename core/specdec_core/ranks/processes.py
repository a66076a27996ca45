"""Starts and ends the processes of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from time import monotonic, sleep

from attrs import frozen

PROGRAM = "from specdec_core.ranks.worker import main; main()"
ENDS_WITHIN_S = 5.0


@frozen(eq=False)
class Process:
    """The process of a rank, and rank 0's end of the pipe to it."""

    rank: int
    popen: subprocess.Popen[bytes]
    connection: Connection


def start(rank: int, size: int, num_threads: int) -> Process:
    """Start a rank's process: a new interpreter with the modules' paths of this one, and without its `__main__`, so
    that a user's script needs no guard. It ignores Ctrl-C, is in no group of the terminal, and ends with this process.

    size: the number of ranks. num_threads: of torch's operations.
    """
    ours, its = Pipe()
    threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
    folder = _working_folder()
    known = [path or folder for path in sys.path if isinstance(path, str)]  # Python ignores other entries, too
    paths = {"PYTHONPATH": os.pathsep.join(path for path in known if path is not None)}
    command = [sys.executable, "-c", PROGRAM, *map(str, (rank, size, its.fileno(), os.getpid()))]
    popen = subprocess.Popen(
        command,
        cwd=folder or os.sep,  # an interpreter that starts in a deleted folder does not find its libraries
        env={**os.environ, **threads, **paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
        start_new_session=True,
    )
    its.close()
    return Process(rank, popen, ours)


def _working_folder() -> str | None:
    """None: it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def end(processes: Sequence[Process]) -> None:
    """End processes that wait for commands, which do so when the pipe is closed, and kill those that do not. May be
    called again."""
    for process in processes:
        with suppress(OSError):
            process.connection.close()
    deadline = monotonic() + ENDS_WITHIN_S
    while any(process.popen.poll() is None for process in processes) and monotonic() < deadline:
        sleep(0.01)
    kill(processes)


def kill(processes: Sequence[Process]) -> None:
    """End processes that may be waiting for each other."""
    for process in processes:
        with suppress(OSError):
            process.popen.kill()
    for process in processes:
        process.popen.wait()
        with suppress(OSError):
            process.connection.close()
