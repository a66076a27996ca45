"""Which errors mean that a GPU's memory ran out. The device still works after them."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an exception was raised since memory ran out, be it in a plugin's code. A capture of a CUDA graph that
    fails may raise another one."""
    return any(map(says_that_memory_ran_out, with_causes(error)))


def says_that_memory_ran_out(error: BaseException) -> bool:
    kinds = torch.OutOfMemoryError, torch.AcceleratorError
    return isinstance(error, kinds) and "out of memory" in str(error)


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
