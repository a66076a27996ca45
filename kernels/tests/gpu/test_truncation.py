"""Temperature, min-p, top-k and top-p of a Triton kernel, against the reference in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specdec_core.ops import REFERENCE
from specdec_kernels.gpu import OPS, truncation

BLOCK = truncation.BLOCK
INF, NAN = float("inf"), float("nan")


def both(logits: torch.Tensor, *rows: tuple[float, float, int, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel and the reference return. rows: temperature, min_p, top_k and top_p of each row."""
    temperature, min_p, top_k, top_p = (np.array(each) for each in zip(*rows, strict=True))
    given_ = temperature.astype(np.float64), min_p.astype(np.float64), top_k.astype(np.int64), top_p.astype(np.float64)
    found: Any = OPS["truncate"](logits, *given_)
    return found, REFERENCE["truncate"](logits, *given_)


def between_sums(logits: torch.Tensor, temperature: float, place: float) -> float:
    """A top_p in the middle between two sums of the likeliest tokens' probabilities, so that rounding does not decide
    which of them stay. place: in [0, 1), of the last token that stays among those that are not too unlikely for it."""
    probs = (logits.double() / temperature).softmax(-1).sort(descending=True).values
    probs = probs[probs > 1e-4] if (probs > 1e-4).any() else probs[:1]
    last = int(place * len(probs))
    return min(0.9999, float(probs[:last].sum() + probs[last] / 2))


parameters = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 1.7]), st.sampled_from([0.0, 0.02, 0.3]), st.sampled_from([0, 1, 2, 40, 10**9])
)


@settings(max_examples=25, deadline=None)
@given(
    num_columns=st.sampled_from([1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 50]),
    rows=st.lists(st.tuples(parameters, st.none() | st.floats(0, 1, exclude_max=True)), min_size=1, max_size=3),
    num_kinds=st.sampled_from([1, 4, 10**6]),
    seed=st.integers(0, 2**32),
)
def test_the_same_tokens_stay(num_columns: int, rows: list[Any], num_kinds: int, seed: int) -> None:
    """Of few kinds of logits, many are equal. Where min-p or top-k come first, sums of the rest are not between."""
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.integers(-num_kinds, num_kinds + 1, (len(rows), num_columns)) * (6 / num_kinds))
    logits = logits.float()
    whole = []
    for row, ((temperature, min_p, top_k), place) in enumerate(rows):
        if place is None or not temperature:
            whole.append((temperature, min_p, top_k, 1.0))
        else:
            whole.append((temperature, 0.0, 0, between_sums(logits[row], temperature, place)))
    found, expected = both(logits, *whole)
    assert torch.equal(found, expected)


def test_top_p_counts_what_is_left() -> None:
    """Four tokens of 1/4 each are left; of these, top_p keeps two."""
    logits = torch.full((3, 300), 2.0)
    logits[:, 100:104] = 5.0
    found, expected = both(logits, (1.0, 0.5, 0, 0.3), (1.0, 0.0, 4, 0.3), (1.0, 0.5, 4, 0.9))
    assert torch.equal(found, expected)
    assert found.isfinite().sum(1).tolist() == [2, 2, 4]
    assert found[0].isfinite().nonzero().flatten().tolist() == [100, 101]


def test_the_first_of_equal_tokens_stay() -> None:
    equal = torch.full((3, 2 * BLOCK + 88), 3.0)
    found, expected = both(equal, (1.0, 0.0, 0, 0.5), (0.0, 0.0, 0, 1.0), (1.0, 0.0, 7, 0.001))
    assert torch.equal(found, expected)
    assert found.isfinite().sum(1).tolist() == [BLOCK + 44, 1, 1]
    exact = torch.full((1, 9), -INF)
    exact[0, 2:6] = 1.0
    assert both(exact, (1.0, 0.0, 0, 0.5))[0].isfinite().nonzero()[:, 1].tolist() == [2, 3]


@pytest.mark.parametrize("top_p", [1e-9, 1 - 2**-24, 1 - 2**-53])
def test_extreme_top_p(top_p: float) -> None:
    logits = torch.tensor([[0.0, -1, -200, -INF, -2], [3, 3, 3, 3, 3]])
    found, _ = both(logits, (1.0, 0, 0, top_p), (1.0, 0, 0, top_p))
    # Rounding decides whether the last token is needed, whose probability is 1e-87.
    assert found.isfinite().sum(1).tolist() in ([[1, 1]] if top_p < 0.5 else [[3, 5], [4, 5]])


def test_equal_zeros_and_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, -0.0, -1, -INF, -INF], [-0.0, 0.0, -1, -INF, -INF]])
    for rows in ((1.0, 0, 1, 1.0), (0.0, 0, 0, 1.0), (1.0, 0, 4, 1.0), (1.0, 1.0, 0, 1.0)):
        found, expected = both(logits, rows, rows)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [(0.0, 0, 0, 1.0), (1.0, 0.1, 3, 0.5)])
def test_rows_that_are_not_sound_stay_so(rows: tuple[float, float, int, float]) -> None:
    logits = torch.zeros(4, BLOCK + 5)
    logits[0, 2], logits[1, BLOCK + 1] = NAN, -torch.tensor(NAN)  # whose sign differs
    logits[2, 4] = INF
    logits[3] = -INF
    found, _ = both(logits, *[rows] * 4)
    assert not found.amax(dim=1).isfinite().any()


def test_rows_do_not_depend_on_each_other() -> None:
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(0))[:, ::2]
    rows = [(0.7, 0.0, 0, 0.9), (1.0, 0.0, 5, 1.0), (0.0, 0.0, 0, 1.0), (1.3, 0.1, 9, 0.5)]
    together, _ = both(logits, *rows)
    for row, each in enumerate(rows):
        assert torch.equal(both(logits[row : row + 1], each)[0][0], together[row])
