"""Norm and rotary embedding as Triton kernels, in types that the kernels for CPUs leave to torch. The rest is tested in
../test_elementwise.py."""

from __future__ import annotations

import pytest
import torch

from specdec_core.ops import REFERENCE
from specdec_kernels.gpu import OPS


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_normed_is_rounded_before_the_weight_is_applied(dtype: torch.dtype) -> None:
    hidden, weight = normal(0, 16, 256, dtype=dtype), normal(1, 256, dtype=dtype)
    found, expected = (ops["rms_norm"](hidden, weight, 1e-6) for ops in (OPS, REFERENCE))
    assert (found == expected).float().mean() > 0.99
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=0)


def test_rotary_in_float16_to_the_last_bit() -> None:
    query, key = (normal(i, 1, 5, 3, 18, dtype=torch.float16).transpose(1, 2) for i in range(2))
    angles = [normal(i, 1, 5, 18, dtype=torch.float16) for i in (2, 3)]
    assert all(map(torch.equal, OPS["rotary"](query, key, *angles), REFERENCE["rotary"](query, key, *angles)))
