"""Packed linear layers are correct, and a row's result has the same bits whatever other rows are computed with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.functional import linear

from specdec_core.ops import REFERENCE
from specdec_kernels.cpu import OPS, amx, lanes
from specdec_kernels.cpu.lanes import LANES, is_supported

Pack = Callable[[torch.Tensor, torch.Tensor | None], Any]
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not is_supported(dtype), reason=f"this CPU lacks {needed}"))
    for dtype, needed in lanes.NEEDED.items()
]


def without_amx(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    product: Any = OPS["pack_linear"](weight, bias)
    product.uses_amx = False
    return product


WAYS = pytest.mark.parametrize(
    ("dtype", "pack"),
    [
        *(pytest.param(*each.values, OPS["pack_linear"], marks=each.marks, id=str(each.values[0])) for each in DTYPES),
        pytest.param(
            torch.bfloat16,
            without_amx,
            marks=pytest.mark.skipif(not amx.is_allowed(), reason="this CPU lacks AMX"),
            id="bfloat16 without AMX",
        ),
    ],
)


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@WAYS
@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 40),
    num_in=st.integers(1, 40) | st.sampled_from([16, 32, 64]),
    num_out=st.integers(1, 11 * LANES),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_it_agrees_with_a_sum_in_float64(
    dtype: torch.dtype, pack: Pack, num_rows: int, num_in: int, num_out: int, has_bias: bool, seed: int
) -> None:
    weight = normal(seed, num_out, 2 * num_in, dtype=dtype)
    bias = normal(seed + 1, num_out, dtype=dtype) if has_bias else None
    rows = normal(seed + 2, 2 * num_in, num_rows, 1, dtype=dtype).transpose(0, 2)
    product = pack(weight, bias)
    found = product(rows)
    expected = linear(rows.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found, expected.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    for row in range(num_rows):
        assert torch.equal(product(rows[:, row]), found[:, row])


@WAYS
@pytest.mark.parametrize("size", [(64, 64), (100, 36), (768, 512), (2048, 130)], ids=str)
def test_a_row_is_the_same_among_any_number_of_others(size: tuple[int, int], dtype: torch.dtype, pack: Pack) -> None:
    product = pack(normal(0, *size[::-1], dtype=dtype), None)
    rows = normal(1, 70, size[0], dtype=dtype)
    alone = torch.cat([product(row) for row in rows.split(1)])
    for first in (0, 5):
        for end in range(first + 1, len(rows) + 1):
            assert torch.equal(product(rows[first:end]), alone[first:end])


@WAYS
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, pack: Pack) -> None:
    product, rows = pack(normal(0, 333, 64, dtype=dtype), None), normal(1, 9, 64, dtype=dtype)
    expected, num_threads = product(rows), torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            assert torch.equal(product(rows), expected)
            assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(num_threads)


@WAYS
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, pack: Pack, poison: float) -> None:
    product, rows = pack(normal(0, 40, 64, dtype=dtype), None), normal(1, 7, 64, dtype=dtype)
    expected = product(rows)
    rows[3, 5] = poison
    found = product(rows)
    assert not found[3].isfinite().any()
    assert torch.equal(found[[0, 1, 2, 4, 5, 6]], expected[[0, 1, 2, 4, 5, 6]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_what_it_cannot_do_is_left_to_the_reference(dtype: torch.dtype) -> None:
    weight, rows = normal(0, 8, 7, dtype=dtype), normal(1, 3, 7, dtype=dtype)
    found, expected = (ops["pack_linear"](weight, None) for ops in (OPS, REFERENCE))
    assert (found is None) == (expected is None)
    if found is not None:
        assert torch.equal(found(rows), expected(rows))


@WAYS
def test_rows_of_another_width_or_type_are_refused(dtype: torch.dtype, pack: Pack) -> None:
    product = pack(normal(0, 32, 16, dtype=dtype), None)
    for rows in (normal(1, 2, 64, dtype=dtype), normal(1, 2, 8, dtype=dtype), normal(1, 2, 16, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"\[\.\.\., 16\]"):
            product(rows)
