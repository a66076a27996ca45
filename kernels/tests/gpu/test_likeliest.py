"""The likeliest tokens, found by Triton kernels, against numpy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specdec_core.ops import REFERENCE
from specdec_kernels.gpu import OPS, argmax

PART = argmax.PART


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=8, deadline=None)
@given(
    num_rows=st.integers(0, 3),
    num_columns=st.sampled_from([1, 7, 1024, PART - 1, PART, PART + 1, 2 * PART + 100]),
    num_kinds=st.sampled_from([1, 3, 10**6]),
    seed=st.integers(0, 2**32),
)
def test_the_first_of_the_largest(
    dtype: torch.dtype, num_rows: int, num_columns: int, num_kinds: int, seed: int
) -> None:
    """Of few kinds of numbers, many are equal."""
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.integers(-num_kinds, num_kinds, (num_rows, num_columns))).to(dtype)
    assert torch.equal(OPS["likeliest"](logits), REFERENCE["likeliest"](logits))


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 5, PART, PART + 9])
def test_rows_that_are_not_finite_are_marked(odd: float, column: int) -> None:
    logits = torch.zeros(4, PART + 10)
    logits[:, 3] = 1
    logits[1, column] = odd
    logits[2] = -torch.inf
    logits[3, 4:] = -torch.inf
    assert OPS["likeliest"](logits).tolist() == REFERENCE["likeliest"](logits).tolist() == [3, -1, -1, 3]
