"""Runs parallel loops on as many threads as torch uses, one loop at a time."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, local
from typing import Any

import numba
import torch

from specdec_core import ConfigError

WORTH_A_THREAD = 2**17
"""From this many multiplications on, another thread saves more time than it costs."""

_ONE_AT_A_TIME = Lock()
"""Engines may run in different threads. numba releases the interpreter's lock in a parallel loop, and its fallback
threading layer "workqueue" kills the process when two threads are in such loops."""

_OF_THIS_THREAD = local()
"""num_threads: the number last given to numba, since asking numba costs more."""


def in_parallel(loop: Callable[..., Any], *args: object) -> Any:
    """Call a loop, a function compiled with parallel=True, on as many threads as torch uses, and return its result. If
    another Python thread is in such a call, wait for it to finish. Raises ConfigError if numba cannot use its threading
    layer."""
    num_threads = torch.get_num_threads()
    if getattr(_OF_THIS_THREAD, "num_threads", None) != num_threads:
        try:
            numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
        except ValueError as error:  # it starts its threads, on a layer that it does not know or have
            raise ConfigError(
                f"NUMBA_THREADING_LAYER={numba.config.THREADING_LAYER!r} cannot be used: {error} For it, give 'omp' or "
                f"'workqueue', or leave it unset"
            ) from error
        _OF_THIS_THREAD.num_threads = num_threads
        torch.set_num_threads(num_threads)  # numba's OpenMP layer changes it as it starts
    with _ONE_AT_A_TIME:
        return loop(*args)
