"""Notices that the engine hangs, and ends the requests, which would else wait for ever."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from specdec_core import AsyncLLM
from specdec_server.lifecycle import Lifecycle

logger = logging.getLogger(__name__)

LEAST_S = 30.0
"""Seconds of a step before it counts as hanging, on a machine on which the longest step is much shorter."""
MARGIN = 10
"""How many times as long as the longest step a step may take: attention to a long context, a draft model and other
processes on the machine come on top."""
CHECKS = 20
"""Within the time that a step may take."""


def step_timeout_of(llm: AsyncLLM, given_s: float | None) -> float:
    """Seconds that a step may take; 0: any time.

    given_s: the server's option; None: `LEAST_S`, or more on a slow machine.
    """
    return max(LEAST_S, MARGIN * llm.engine.longest_step_s) if given_s is None else given_s


class Watchdog:
    """Looks at the engine's progress again and again.

    A step that takes too long makes all requests fail, those that run and those that come, until the step ends. The
    engine's thread cannot be ended from outside, so only a new process helps if it never does.

    is_stuck: whether a step takes too long. Any thread may read it.
    interval_s: seconds from one look at the engine to the next.
    """

    def __init__(self, llm: AsyncLLM, lifecycle: Lifecycle, timeout_s: float) -> None:
        self.is_stuck = False
        self.interval_s = (timeout_s or LEAST_S) / CHECKS
        self._llm, self._lifecycle, self._timeout_s = llm, lifecycle, timeout_s
        self._progress: int | None = None
        self._last_s, self._waited_s = monotonic(), 0.0

    async def run(self) -> None:
        """Watch until the task is cancelled."""
        while True:
            await asyncio.sleep(self.interval_s)
            was_stuck = self.is_stuck
            if self.look() and not was_stuck:
                where = self._llm.describe_work()
                logger.error("specdec: a step takes longer than %g s. It is here:\n%s", self._timeout_s, where)
                self._lifecycle.fail(
                    f"the engine hangs: a step takes longer than {self._timeout_s:g} s. The server's log says where. "
                    f"Restart it if that does not end, or give a longer --step-timeout"
                )
            elif was_stuck and not self.is_stuck:
                logger.error("specdec: the step has ended, and requests are taken again")
                self._lifecycle.recover()

    def look(self) -> bool:
        """Look at the engine's progress, `interval_s` after the last time. Returns `is_stuck`."""
        last_s, self._last_s = self._last_s, monotonic()
        if (progress := self._llm.progress) is None or progress != self._progress:
            self._waited_s = 0.0
        else:  # a process that was stopped for a while has not given the engine that time
            self._waited_s += min(self._last_s - last_s, 2 * self.interval_s)
        self._progress = progress
        self.is_stuck = 0 < self._timeout_s < self._waited_s
        return self.is_stuck
