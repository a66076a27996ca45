"""Norm and rotary embedding as Triton kernels, compared with torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from specdec_core.ops import REFERENCE
from specdec_kernels.gpu import OPS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEEDS = st.integers(0, 2**32)


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(num_rows=st.integers(0, 9), width=st.integers(1, 70), eps=st.sampled_from([1e-6, 1e-5, 0.5]), seed=SEEDS)
def test_rms_norm(dtype: torch.dtype, num_rows: int, width: int, eps: float, seed: int) -> None:
    hidden = normal(seed, width, 1, num_rows, dtype=dtype).transpose(0, 2)
    weight = normal(seed + 1, width, dtype=dtype)
    found, expected = (ops["rms_norm"](hidden, weight, eps) for ops in (OPS, REFERENCE))
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]  # a last bit, rounded twice
    torch.testing.assert_close(found, expected, rtol=rounding, atol=1e-7 if dtype == torch.float16 else 1e-30)
    for row in range(num_rows):
        assert torch.equal(OPS["rms_norm"](hidden[row], weight, eps), found[row])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_what_is_normed_is_rounded_before_the_weight_is_applied(dtype: torch.dtype) -> None:
    hidden, weight = normal(0, 16, 256, dtype=dtype), normal(1, 256, dtype=dtype)
    found, expected = (ops["rms_norm"](hidden, weight, 1e-6) for ops in (OPS, REFERENCE))
    assert (found == expected).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    num_tokens=st.integers(0, 6),
    num_heads=st.integers(1, 4),
    half=st.integers(1, 20),
    seed=SEEDS,
    is_split=st.booleans(),
)
def test_rotary_to_the_last_bit(
    dtype: torch.dtype, num_tokens: int, num_heads: int, half: int, seed: int, is_split: bool
) -> None:
    query = normal(seed, 1, num_tokens, num_heads, 2 * half, dtype=dtype).transpose(1, 2)
    key = normal(seed + 1, 1, 1, num_tokens, 4 * half, dtype=dtype)[..., : 2 * half]
    angles = [normal(seed + i, 1, num_tokens, 4 * half, dtype=dtype) for i in (2, 3)]
    cos, sin = (each[..., ::2] if is_split else each[..., : 2 * half].contiguous() for each in angles)
    found, expected = (ops["rotary"](query, key, cos, sin) for ops in (OPS, REFERENCE))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["rms_norm", "rotary"])
@pytest.mark.parametrize("dtypes", [(torch.float64,) * 2, (torch.bfloat16, torch.float32)])
def test_other_and_mixed_types_are_left_to_the_reference(name: str, dtypes: tuple) -> None:
    hidden, rest = normal(0, 1, 2, 3, 8, dtype=dtypes[0]), normal(1, 1, 3, 8, dtype=dtypes[1])
    given = (hidden, rest[0, 0], 1e-5) if name == "rms_norm" else (hidden, hidden, rest, rest.flip(1))
    found, expected = (ops[name](*given) for ops in (OPS, REFERENCE))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_rms_norm_refuses_another_width() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        OPS["rms_norm"](torch.ones(2, 16), torch.ones(8), 1e-6)
