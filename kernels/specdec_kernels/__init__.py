"""Faster versions of the operations in specdec_core.ops: compiled by numba for the CPU at hand, or by Triton for a CUDA
device."""

from __future__ import annotations

from importlib.util import find_spec

from specdec_core import OpsSpec, hookimpl


@hookimpl
def specdec_ops(device: str) -> OpsSpec | None:
    if device == "cpu":
        from specdec_kernels.cpu import OPS, supports

        return OpsSpec(api=1, ops=OPS, supports=supports)
    if device == "cuda" and find_spec("triton") is not None:  # there is none for Windows and macOS
        from specdec_kernels import gpu

        return OpsSpec(api=1, ops=gpu.OPS, supports=gpu.supports)
    return None
