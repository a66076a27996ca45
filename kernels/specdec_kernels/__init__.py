"""Faster versions of the operations in specdec_core.ops, compiled by numba for the CPU at hand."""

from __future__ import annotations

from specdec_core import OpsSpec, hookimpl


@hookimpl
def specdec_ops(device: str) -> OpsSpec | None:
    if device != "cpu":
        return None
    from specdec_kernels.cpu import OPS, supports

    return OpsSpec(api=1, ops=OPS, supports=supports)
