"""Tokens drawn by compiled code, on a CPU and on a GPU, against torch's cumulative sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import on_each_device
from hypothesis import given, settings, strategies as st

from specdec_core.ops import REFERENCE
from specdec_kernels.cpu.drawing import NUM_SUMS, PART

GPU_PART = 4096


def whole_weights(seed: int, num_rows: int, num_columns: int, share: float) -> torch.Tensor:
    """Whole numbers, whose sums are exact. A share of them is positive, at least one in each row."""
    random = np.random.default_rng(seed)
    weights = random.integers(1, 9, (num_rows, num_columns)) * (random.random((num_rows, num_columns)) < share)
    weights[np.arange(num_rows), random.integers(num_columns, size=num_rows)] = 3
    return torch.from_numpy(weights.astype(np.float32))


@on_each_device
@settings(max_examples=12, deadline=None)
@given(
    num_rows=st.integers(0, 3),
    num_columns=st.sampled_from(
        [1, NUM_SUMS - 1, PART - 1, PART, PART + 1, 1024, GPU_PART - 1, GPU_PART, 2 * GPU_PART + 100]
    ),
    share=st.sampled_from([0.0, 0.001, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_tokens_are_those_of_exact_sums(ops: dict, num_rows: int, num_columns: int, share: float, seed: int) -> None:
    weights = whole_weights(seed, num_rows, num_columns, share)
    uniform = torch.rand(num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    tokens = ops["draw"](weights, uniform)
    assert torch.equal(tokens, REFERENCE["draw"](weights, uniform))
    assert (weights.gather(1, tokens.unsqueeze(1)) > 0).all()


@on_each_device
def test_every_threshold_between_two_tokens(ops: dict) -> None:
    """Of whole weights, a random number k / total is the first that draws the token which the sum reaches after k."""
    weights = torch.tensor([[0.0, 2, 0, 1, 5, 0]]).expand(8, 6)
    uniform = torch.arange(8, dtype=torch.float64) / 8
    assert ops["draw"](weights, uniform).tolist() == [1, 1, 3, 4, 4, 4, 4, 4]
    below = torch.nextafter(uniform[1:], torch.zeros(7, dtype=torch.float64))
    assert ops["draw"](weights[1:], below).tolist() == [1, 1, 3, 4, 4, 4, 4]


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_without_weight_is_never_drawn(ops: dict, dtype: torch.dtype) -> None:
    """At the largest random number, rounded sums may not reach the threshold."""
    weights = torch.rand(6, GPU_PART + 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights[:, ::3] = 0
    weights[3:, -800:] = 0
    weights[4, :GPU_PART] = 0
    weights[4, GPU_PART : GPU_PART + 3] = 1e-30
    largest = torch.full((6,), 1 - 2**-53, dtype=torch.float64)
    tokens = ops["draw"](weights, largest)
    assert (weights.gather(1, tokens.unsqueeze(1)) > 0).all()
    assert (tokens >= 0).all()


@on_each_device
def test_rows_do_not_depend_on_each_other(ops: dict) -> None:
    random = torch.Generator().manual_seed(1)
    weights = torch.rand(9, 5000, generator=random).softmax(-1)
    uniform = torch.rand(9, generator=random, dtype=torch.float64)
    together = ops["draw"](weights, uniform)
    for row in range(9):
        assert ops["draw"](weights[row : row + 1], uniform[row : row + 1]).item() == together[row]


@on_each_device
def test_rows_that_are_not_sound_give_an_index(ops: dict) -> None:
    weights = torch.zeros(3, 9)
    weights[1] = torch.nan
    weights[2, 4] = torch.inf
    tokens = ops["draw"](weights, torch.tensor([0.0, 0.5, 0.9], dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < 9)).all()


@on_each_device
def test_rows_may_have_other_rows_between_them(ops: dict) -> None:
    weights = whole_weights(0, 6, 50, 0.5)[::2]
    uniform = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    assert torch.equal(ops["draw"](weights, uniform), REFERENCE["draw"](weights, uniform))
