"""Operations of specdec_core.ops, faster: compiled by numba for the CPU at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specdec_core import hookimpl


@hookimpl
def specdec_ops(device: str) -> Mapping[str, Callable[..., Any]]:
    if device != "cpu":
        return {}
    from specdec_kernels.cpu import OPS

    return OPS
