"""What ranks exchange in the middle of a forward pass: tensors, over the loopback device or between GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as torch_distributed

from specdec_core.models.split_modules import Part

TIMEOUT = timedelta(hours=1)
"""Longer than loading a part of the largest models takes. Over loopback, a rank that ends is noticed at once, without
it; between GPUs that has not been tried."""

FINDS_WITHIN = timedelta(minutes=2)
"""How long a rank waits to be found by the others, which are running by then."""

SIGNALS_AFTER = timedelta(seconds=0.1)
"""How long an exchange may hold up Ctrl-C."""

LOOPBACK = "127.0.0.1"

distributed: Any = torch_distributed  # whose type hints lack most of what is used here


class LostRankError(Exception):
    """Another rank has ended, or does not answer. `Ranks` finds out which, and why."""


def is_lost(error: BaseException | None) -> bool:
    """Whether an exception means that another rank has ended: code between may have raised another one for it."""
    return error is not None and (isinstance(error, LostRankError) or is_lost(error.__cause__))


def join(file: str, rank: int, size: int, device: torch.device) -> Part:
    """Wait for the other ranks, and return this rank's `Part`. Makes no process group of torch the default one, so that
    several engines, and a user's own groups, can be in one process.

    file: the path of a file that does not exist yet, where the ranks write how to reach each other.
    """
    store = distributed.FileStore(file, size)
    store.set_timeout(FINDS_WITHIN)
    is_on_gpu = device.type == "cuda"
    group = _between_gpus(store, rank, size) if is_on_gpu else _over_loopback(store, rank, size)

    def gather(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        mine = tensor.contiguous()
        found = [torch.empty_like(mine) for _ in range(size)]
        # As bytes: which dtypes can be exchanged depends on the backend.
        as_bytes = [each.view(-1).view(torch.uint8) for each in found]
        try:
            work = group.allgather([as_bytes], [mine.view(-1).view(torch.uint8)])
            if is_on_gpu:
                work.wait()  # the stream waits, not the host. With a time limit, NCCL would stop the host, and give up
            else:
                _wait(work)
        except RuntimeError as error:
            raise LostRankError(str(error)) from error
        return found

    return Part(rank, size, gather)


def _wait(work: Any) -> None:
    """Wait for an exchange on the host, and let Python handle signals (Ctrl-C) now and then."""
    while True:
        try:
            work.wait(SIGNALS_AFTER)
            return
        except RuntimeError:
            if work.is_completed():
                raise


def _over_loopback(store: Any, rank: int, size: int) -> Any:
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = TIMEOUT
    try:
        return distributed.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise LostRankError(str(error)) from error


def _between_gpus(store: Any, rank: int, size: int) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return distributed.ProcessGroupNCCL(store, rank, size, options)
