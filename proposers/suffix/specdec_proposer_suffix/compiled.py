"""numba decorators for this plugin's inner loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def jit(function: F) -> F:
    """Compile a function with numba. This happens at the first call with each combination of argument types.

    The machine code is cached beside the source file if that folder is writable.
    """
    return _jit(function)


def jit_inline(function: F) -> F:
    """Like `jit`, but numba also inlines the function into its callers. Otherwise each call with a `Store` as an
    argument would copy the descriptors of its arrays, dozens of machine words."""
    return _jit(function, forceinline=True)


def _jit(function: F, **options: bool) -> F:
    try:
        return njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # numba found no writable folder for its cache
        return njit(nogil=True, **options)(function)
