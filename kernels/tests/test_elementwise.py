"""Norm, rotary embedding and rounding, compared with torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import on_each_device
from hypothesis import given, settings, strategies as st

from specdec_core import compiled
from specdec_core.ops import REFERENCE
from specdec_kernels.cpu.activations import sigmoid
from specdec_kernels.cpu.bits import as_array, as_stored

DTYPES = [torch.float32, torch.bfloat16]
SEEDS = st.integers(0, 2**32)


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(0, 9), width=st.integers(1, 70), eps=st.sampled_from([1e-6, 1e-5, 0.5]), seed=SEEDS)
def test_rms_norm(ops: dict, dtype: torch.dtype, num_rows: int, width: int, eps: float, seed: int) -> None:
    hidden = normal(seed, width, 1, num_rows, dtype=dtype).transpose(0, 2)
    weight = normal(seed + 1, width, dtype=dtype)
    found, expected = (each["rms_norm"](hidden, weight, eps) for each in (ops, REFERENCE))
    # In bfloat16 a last bit, rounded twice.
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-30)
    for row in range(num_rows):
        assert torch.equal(ops["rms_norm"](hidden[row], weight, eps), found[row])


@on_each_device
def test_rms_norm_refuses_another_width(ops: dict) -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        ops["rms_norm"](torch.ones(2, 16), torch.ones(8), 1e-6)


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(0, 6),
    num_heads=st.integers(1, 4),
    half=st.integers(1, 20),
    seed=SEEDS,
    is_split=st.booleans(),
)
def test_rotary_to_the_last_bit(
    ops: dict, dtype: torch.dtype, num_tokens: int, num_heads: int, half: int, seed: int, is_split: bool
) -> None:
    query = normal(seed, 1, num_tokens, num_heads, 2 * half, dtype=dtype).transpose(1, 2)
    key = normal(seed + 1, 1, 1, num_tokens, 4 * half, dtype=dtype)[..., : 2 * half]
    angles = [normal(seed + i, 1, num_tokens, 4 * half, dtype=dtype) for i in (2, 3)]
    cos, sin = (each[..., ::2] if is_split else each[..., : 2 * half].contiguous() for each in angles)
    found, expected = (each["rotary"](query, key, cos, sin) for each in (ops, REFERENCE))
    assert all(map(torch.equal, found, expected))


@on_each_device
@pytest.mark.parametrize("name", ["rms_norm", "rotary"])
@pytest.mark.parametrize("dtypes", [(torch.float16,) * 2, (torch.float64,) * 2, (torch.bfloat16, torch.float32)])
def test_other_and_mixed_types_are_left_to_the_reference(ops: dict, name: str, dtypes: tuple) -> None:
    hidden, rest = normal(0, 1, 2, 3, 8, dtype=dtypes[0]), normal(1, 1, 3, 8, dtype=dtypes[1])
    given = (hidden, rest[0, 0], 1e-5) if name == "rms_norm" else (hidden, hidden, rest, rest.flip(1))
    found, expected = (each[name](*given) for each in (ops, REFERENCE))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@compiled()
def _sigmoid(numbers):
    sigmoid(numbers, len(numbers))


def test_sigmoid_is_as_exact_on_both_sides() -> None:
    numbers = np.linspace(-87, 87, 100_000, dtype=np.float32)
    found = numbers.copy()
    _sigmoid(found)
    exact = 1 / (1 + np.exp(-numbers.astype(np.float64)))
    assert np.abs(found / exact - 1).max() < 4e-7


@compiled()
def _round(numbers, output):
    for i in range(len(numbers)):
        output[i] = as_stored(output, numbers[i])


def test_float32_is_rounded_to_bfloat16_as_torch_does_it() -> None:
    """Tests all values of the upper 16 bits of a float32, including infinities, subnormals and NaN."""
    upper = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    numbers = torch.from_numpy((upper[:, None] | lower).flatten().view(np.float32))
    found, expected = torch.empty(len(numbers), dtype=torch.bfloat16), numbers.to(torch.bfloat16)
    _round(numbers.numpy(), as_array(found))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.view(torch.int16)[~found.isnan()], expected.view(torch.int16)[~found.isnan()])
