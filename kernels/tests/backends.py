"""The operations of each type of device, to run the same tests on all of them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from specdec_kernels import cpu

OPS = {"cpu": cpu.OPS}
if find_spec("triton"):
    from specdec_kernels import gpu

    OPS["gpu"] = gpu.OPS

on_each_device = pytest.mark.parametrize("ops", OPS.values(), ids=OPS.keys())
