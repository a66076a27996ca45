"""Parallel loops on as many threads as torch uses, one loop at a time."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, local

import numba
import torch

_ONE_AT_A_TIME = Lock()
"""Engines may run in threads of their own. numba gives up the interpreter's lock in a parallel loop, and "workqueue",
the threading layer that it takes where it finds no other, ends the process when two threads are in such loops."""

_OF_THIS_THREAD = local()
"""num_threads: how many numba was told to use, which costs more to ask than to remember."""


def in_parallel(loop: Callable[..., None], *args: object) -> None:
    """Call a function compiled with parallel=True."""
    num_threads = torch.get_num_threads()
    if getattr(_OF_THIS_THREAD, "num_threads", None) != num_threads:
        _OF_THIS_THREAD.num_threads = num_threads
        numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
        torch.set_num_threads(num_threads)  # numba's OpenMP layer changes it as it starts
    with _ONE_AT_A_TIME:
        loop(*args)
