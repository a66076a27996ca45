"""The most likely tokens, found by Triton kernels, against a stable sort in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specdec_core.ops import REFERENCE
from specdec_kernels.gpu import OPS, top_tokens

PART = top_tokens.PART
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_logits(seed: int, num_rows: int, num_columns: int, num_kinds: int) -> torch.Tensor:
    """Whole numbers, and half of them, of few kinds: many are equal. Some are impossible, at least one is not."""
    random = np.random.default_rng(seed)
    logits = random.integers(-num_kinds, num_kinds + 1, (num_rows, num_columns)) / 2
    logits[random.random(logits.shape) < random.choice([0, 0.5, 0.99])] = -np.inf
    logits[np.arange(num_rows), random.integers(num_columns, size=num_rows)] = 1
    return torch.from_numpy(logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    num_rows=st.integers(0, 3),
    num_columns=st.sampled_from([1, 7, 1000, PART - 1, PART, PART + 1, 2 * PART + 100]),
    num_kinds=st.sampled_from([1, 5, 200]),
    number=st.sampled_from([1, 2, 3, 10, 64, 300]),
    seed=st.integers(0, 2**32),
)
def test_the_first_of_the_most_likely(
    dtype: torch.dtype, num_rows: int, num_columns: int, num_kinds: int, number: int, seed: int
) -> None:
    logits = random_logits(seed, num_rows, num_columns, num_kinds).to(dtype)
    log_probs, tokens = OPS["most_likely"](logits, number)
    expected, order = logits.double().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    assert (log_probs.dtype, tokens.dtype) == (torch.float32, torch.int64)
    assert torch.equal(tokens, order[:, :number])
    torch.testing.assert_close(log_probs.double(), expected[:, :number], rtol=1e-5, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(num_columns=st.sampled_from([3, 900, PART + 5]), number=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_the_same_as_the_reference(num_columns: int, number: int, seed: int) -> None:
    logits = 5 * torch.randn(4, num_columns, generator=torch.Generator().manual_seed(seed))
    (log_probs, tokens), (expected, expected_tokens) = (ops["most_likely"](logits, number) for ops in (OPS, REFERENCE))
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-6)


def test_equal_zeros_and_extreme_logits() -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 1e-45, -1e-45, 1e38, -1e38, -torch.inf]])
    log_probs, tokens = OPS["most_likely"](logits, 8)
    assert tokens.tolist() == [[5, 3, 0, 1, 2, 4, 6, 7]]
    assert log_probs[0, 0] == 0
    assert log_probs[0, -1] == -torch.inf


@pytest.mark.parametrize("odd", [torch.nan, -torch.tensor(torch.nan).item(), torch.inf])
@pytest.mark.parametrize("column", [0, 5, PART, PART + 9])
def test_rows_that_are_not_finite(odd: float, column: int) -> None:
    logits = torch.zeros(4, PART + 10)
    logits[:, 3] = 1
    logits[1, column] = odd
    logits[2] = -torch.inf
    logits[3, 4:] = -torch.inf
    for ops in (OPS, REFERENCE):
        log_probs, tokens = ops["most_likely"](logits, 4)
        assert log_probs[1:3].isnan().all()
        assert log_probs[[0, 3]].isfinite().all()
        assert ((tokens >= 0) & (tokens < PART + 10)).all()


@pytest.mark.parametrize("number", [7, 64])
def test_rows_do_not_depend_on_each_other(number: int) -> None:
    logits = torch.randn(number, 2 * PART + 9, generator=torch.Generator().manual_seed(1))[:, ::2]
    log_probs, tokens = OPS["most_likely"](logits, 9)
    for row in range(0, number, 3):
        alone, alone_tokens = OPS["most_likely"](logits[row : row + 1], 9)
        assert torch.equal(alone[0], log_probs[row])
        assert torch.equal(alone_tokens[0], tokens[row])


def test_more_than_can_be_compared_is_left_to_the_reference() -> None:
    logits = torch.randn(2, 9 * PART, generator=torch.Generator().manual_seed(2))
    found, expected = (ops["most_likely"](logits, 3000) for ops in (OPS, REFERENCE))
    assert all(map(torch.equal, found, expected))
