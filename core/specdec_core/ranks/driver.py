"""Rank 0's view of the other ranks: it starts them, sends commands, and finds out why one has ended."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from weakref import finalize

import torch
from attrs import evolve

from specdec_core.errors import ConfigError, DeviceError, SpecdecError
from specdec_core.models.split_modules import Part
from specdec_core.plugins.discovery import Plugin
from specdec_core.ranks import processes
from specdec_core.ranks.group import LostRankError, is_lost, join
from specdec_core.ranks.interrupts import later_interrupts
from specdec_core.ranks.messages import Command, Sum, described, send

ANSWERS_WITHIN_S = 3.0
"""How long rank 0 waits for the others to say why an exchange failed."""


class Ranks:
    """The ranks of an engine but the first, which is this process. They end with `close`, when this object is
    garbage-collected, at the interpreter's exit, and when this process is killed.

    size: the number of ranks. plugins: those that are loaded here, which the other ranks load, too.

    part: this rank's part of models.
    sent: a checksum of all messages to the other ranks.
    is_serving: whether the engine is built. Before, an error of this rank's own is raised as it is; afterwards, no
        command can follow one that was broken off, and interrupts (Ctrl-C) wait until the ranks are in step.

    Raises DeviceError if a rank cannot be started.
    """

    def __init__(self, size: int, device: torch.device, plugins: Sequence[Plugin]) -> None:
        self.part: Part
        self.sent, self.is_serving = Sum(), False
        self.size, self._device = size, device
        self._pending: list[Command] = []
        self._failure: str | None = None
        self._is_out_of_step = self._is_closed = False
        self._owner_id = os.getpid()
        self._reports: dict[int, tuple[str, Any]] = {}
        self._processes: list[processes.Process] = []
        self._parts: list[Part] = []  # the one above, once the ranks have found each other
        self._folder = tempfile.mkdtemp(prefix="specdec-ranks-")
        threads = torch.get_num_threads()
        # All ranks have as many threads: with others, products may round differently, and routers choose otherwise.
        each = max(1, threads // size) if device.type == "cpu" else threads
        self._end = finalize(self, _end, self._owner_id, self._processes, self._parts, self._folder, threads, each)
        torch.set_num_threads(each)
        try:
            for rank in range(1, size):
                self._processes.append(processes.start(rank, size, each))
            file = str(Path(self._folder, "ranks"))
            self.ask("prepare", device, each, [evolve(plugin, hooks=None, specs=[]) for plugin in plugins])
            with self.together("join", file):
                self.part = join(file, 0, size, device)
            self._parts.append(self.part)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Of the other ranks, in their order."""
        return [process.popen.pid for process in self._processes]

    @property
    def _connections(self) -> list[Connection]:
        return [process.connection for process in self._processes]

    def later(self, name: str, *args: Any) -> None:
        """Note a command for the other ranks, which get it with the next one that they run together with this rank."""
        if self._failure is None:
            self._pending.append((name, args))

    @contextmanager
    def together(self, name: str, *args: Any) -> Iterator[None]:
        """A context in which this rank runs what the others run by this command.

        Raises DeviceError if a rank has ended, and from then on, and SpecdecError in a fork of the process.
        """
        if os.getpid() != self._owner_id:
            raise SpecdecError(
                f"this engine's ranks belong to process {self._owner_id}, of which this one is a fork: make the engine "
                f"after forking, or start processes by 'spawn'"
            )
        if self._failure is not None:
            raise DeviceError(self._failure)
        with later_interrupts(self._give_up) if self.is_serving else nullcontext():
            if self._is_out_of_step:
                raise self._failed(RuntimeError("an exception broke off what the ranks did together"))
            self._is_out_of_step = True
            try:
                self._send(name, args)
                yield
            except BaseException as error:
                failure = self._failed(error)
                if failure is error:
                    raise
                raise failure from error
            self._is_out_of_step = False

    def ask(self, name: str, *args: Any) -> list[Any]:
        """Return the other ranks' answers to a command, in their order."""
        with self.together("ask", name, *args):
            return [self._answer(process) for process in self._processes]

    def serve(self) -> None:
        """Note that the engine is built. The ranks have found each other: nothing is left on disk from here on."""
        self.is_serving = True
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """End the other ranks. May be called again."""
        self._is_closed = True
        self._failure = self._failure or "this engine was closed, as its LLM was: make another one"
        self._pending.clear()
        self._end()

    def undivided(self) -> AbstractContextManager[None]:
        """A context in which this rank does what the others do later. Interrupts (Ctrl-C) wait for its end."""
        return later_interrupts()

    def _send(self, name: str, args: tuple[Any, ...]) -> None:
        try:
            send(self._connections, [*self._pending, (name, args)], self.sent)
        except OSError as error:
            raise LostRankError("a pipe has no other end") from error
        self._pending.clear()

    def _answer(self, process: processes.Process) -> Any:
        try:
            kind, value = process.connection.recv()
        except (EOFError, OSError) as error:
            raise LostRankError(f"rank {process.rank} has ended") from error
        if kind != "answer":
            self._reports[process.rank] = kind, value
            raise LostRankError(f"rank {process.rank} has failed")
        return value

    @property
    def failure(self) -> DeviceError | None:
        """Why no command can be run any more; None: it can, or this object was closed. A rank that has ended is noticed
        here before a command fails. Any thread may ask."""
        if self._is_closed or self._owner_id != os.getpid():
            return None
        if self._failure is not None:
            return DeviceError(self._failure)
        for process in self._processes:
            if process.popen.poll() is not None:
                return DeviceError(self._fatal(self._how_ended(process)))
        return None

    def _give_up(self) -> None:
        """End the other ranks, whose exchange with this one then fails."""
        processes.kill(self._processes)

    def _fatal(self, why: str) -> str:
        return (
            f"{why}. The ranks share each layer, so none of them can go on. All requests were ended, and this engine "
            f"can run no more: make another one, or restart the process"
        )

    def _how_ended(self, process: processes.Process) -> str:
        code = process.popen.poll() or 0
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"rank {process.rank} of {self.size} (process {process.popen.pid}) {how}"

    def _failed(self, error: BaseException) -> BaseException:
        """End the other ranks, which are out of step, and return the error to raise."""
        lost = is_lost(error)
        why = self._why() if lost else f"rank 0 of {self.size} raised {described(error)}"
        processes.kill(self._processes)
        self._failure = self._fatal(why)
        return DeviceError(self._failure) if lost or (self.is_serving and isinstance(error, Exception)) else error

    def _why(self) -> str:
        """Find out which rank failed first, and why: one that was killed or that raised an error of its own comes
        before those that lost the connection to it."""
        deadline = monotonic() + ANSWERS_WITHIN_S
        while True:
            for process in self._processes:
                code = process.popen.poll()
                self._read_report(process)  # a process reports before it ends
                kind, value = self._reports.get(process.rank, ("", ""))
                if kind == "error":
                    return f"rank {process.rank} of {self.size} raised {value}"
                if code is not None and kind != "lost":
                    return self._how_ended(process)
            if monotonic() > deadline:
                lost = ", ".join(str(rank) for rank in self._reports) or "others"
                return f"a rank of {self.size} does not answer (lost by {lost})"
            sleep(0.01)

    def _read_report(self, process: processes.Process) -> None:
        try:
            while process.rank not in self._reports and process.connection.poll():
                kind, value = process.connection.recv()
                if kind != "answer":
                    self._reports[process.rank] = kind, value
        except (EOFError, OSError):
            return


def device_of(rank: int, device: torch.device, size: int) -> torch.device:
    """The device of a rank: GPUs in a row from rank 0's on. Raises ConfigError if there are not enough."""
    if device.type != "cuda":
        return device
    first = device.index or 0
    if first + size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size={size} needs as many GPUs, from {device} on, and there are "
            f"{torch.cuda.device_count()}: lower it, or give another device"
        )
    return torch.device("cuda", first + rank)


def _end(
    owner_id: int,
    started: Sequence[processes.Process],
    parts: Sequence[Part],
    folder: str,
    num_threads: int,
    num_set: int,
) -> None:
    if os.getpid() != owner_id:  # a fork: the ranks are its parent's
        for part in parts:  # is never freed: that would wait for threads that a fork does not have
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
        return
    processes.end(started)
    shutil.rmtree(folder, ignore_errors=True)
    if torch.get_num_threads() == num_set:  # else another engine has set it since, and its ranks depend on that
        torch.set_num_threads(num_threads)
