"""Finds the objects that an object keeps alive, by following Python references."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from logging import Logger
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import attrs
import numpy as np
import torch

SHARED = (type, ModuleType, FrameType, CodeType, BuiltinFunctionType, Logger)
"""Types that the search does not enter, because they belong to the program and refer to everything else."""


@attrs.frozen
class HeldObjects:
    """What can be reached from one object by following Python references.

    strings: all strings among the reached objects.
    size: the number of references between reached objects, plus the number of elements of arrays and tensors.
    """

    strings: set[str]
    size: int

    @classmethod
    def of(cls, root: object, lent: Sequence[object]) -> HeldObjects:
        """Follow all references from `root`. lent: objects that the search does not enter. For a bound method in
        `lent`, the search does not enter its instance (`__self__`) either."""
        owners = [value.__self__ for value in lent if hasattr(value, "__self__")]
        seen = {id(value) for value in (*lent, *owners)}
        strings: set[str] = set()
        size, pending = 0, [root]
        while pending:
            value = pending.pop()
            if id(value) in seen or isinstance(value, SHARED):
                continue
            seen.add(id(value))
            if isinstance(value, str):
                strings.add(value)
            elif isinstance(value, np.ndarray):
                size += value.size
            elif isinstance(value, torch.Tensor):
                size += value.numel()
            held = _held(value)
            size += len(held)
            pending += held
        return cls(strings, size)


def _held(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):  # not its module's globals
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    held = gc.get_referents(value)
    return [*value.keys(), *held] if isinstance(value, dict) else held  # keys that are strings would be left out
