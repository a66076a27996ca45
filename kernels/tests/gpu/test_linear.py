"""Linear layers as Triton kernels are right, and a row's result has the same bits whatever other rows are computed with
it, by one program or by several."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.functional import linear

from specdec_kernels.gpu import OPS, linear as kernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    num_rows=st.integers(0, 70),
    num_in=st.integers(1, 150),
    num_out=st.integers(1, 150),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_it_agrees_with_a_sum_in_float64(
    dtype: torch.dtype, num_rows: int, num_in: int, num_out: int, has_bias: bool, seed: int
) -> None:
    weight = normal(seed, num_out, num_in, dtype=dtype)
    bias = normal(seed + 1, num_out, dtype=dtype) if has_bias else None
    rows = normal(seed + 2, num_in, num_rows, 1, dtype=dtype).transpose(0, 2)
    found = OPS["pack_linear"](weight, bias)(rows)
    expected = linear(rows.double(), weight.double(), None if bias is None else bias.double())
    rounding = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found, expected.to(dtype), rtol=rounding, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(64, 64), (100, 36), (1100, 70), (2048, 40)], ids=str)
def test_a_row_is_the_same_among_any_number_of_others(size: tuple[int, int], dtype: torch.dtype) -> None:
    product = OPS["pack_linear"](normal(0, *size[::-1], dtype=dtype), normal(2, size[1], dtype=dtype))
    rows = normal(1, 70, size[0], dtype=dtype)
    alone = torch.cat([product(row) for row in rows[:10].split(1)])
    for number in (7, 64, 70):
        for first in (0, 3):
            together = product(rows[first : first + number])[: len(alone) - first]
            assert torch.equal(together, alone[first : first + len(together)])


def test_a_layer_with_few_outputs_has_chunks() -> None:
    assert kernel.num_chunks_of(40, 2048) == 4
    assert kernel.num_chunks_of(128256, 4096) == 1
    assert kernel.num_chunks_of(1, 1) == 1


@pytest.mark.parametrize("has_bias", [False, True])
def test_one_program_or_several_make_no_difference(monkeypatch: pytest.MonkeyPatch, has_bias: bool) -> None:
    bias = normal(2, 40, dtype=torch.bfloat16) if has_bias else None
    product, rows = (
        OPS["pack_linear"](normal(0, 40, 2100, dtype=torch.bfloat16), bias),
        normal(1, 5, 2100, dtype=torch.bfloat16),
    )
    apart = product(rows)
    monkeypatch.setattr(kernel, "MOST_ROWS_APART", 0)
    assert torch.equal(product(rows), apart)


def test_a_weight_that_is_turned_is_left_to_torch() -> None:
    assert OPS["pack_linear"](torch.ones(4, 6).T, None) is None
    assert OPS["pack_linear"](torch.ones(4, 6, dtype=torch.float64), None) is None
