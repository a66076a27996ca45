"""How this plugin compiles its inner loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compiled when first called with arguments of some types, and cached beside the source where that is writable."""
    return _compiled(function)


def inlined(function: F) -> F:
    """The same, and made part of its callers: a call with a store would copy the dozens of words that describe it."""
    return _compiled(function, forceinline=True)


def _compiled(function: F, **options: bool) -> F:
    try:
        return njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # numba found no folder that it may write its cache to
        return njit(nogil=True, **options)(function)
