"""Chi-square tests of random draws. Seeds are fixed, so a test never fails by bad luck."""

from __future__ import annotations

import torch


def p_value(statistic: float, degrees_of_freedom: int) -> float:
    half = torch.tensor([degrees_of_freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def fit_p_value(draws: torch.Tensor, weights: torch.Tensor, min_expected: float = 8.0) -> float:
    """Return the p-value of a chi-square test that random draws follow the given weights.

    draws: int64 [n], outcomes from 0 to k - 1. weights: [k], not normalized.
    min_expected: all outcomes with a lower expected count are merged into one.
    """
    expected = weights.double() / weights.double().sum() * draws.numel()
    observed = torch.bincount(draws, minlength=weights.numel()).double()
    assert observed.numel() == weights.numel(), "a draw lies outside the weights"
    assert not observed[expected == 0].any(), "a draw has weight zero"
    rare = expected < min_expected
    if rare.any():
        expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
        observed = torch.cat([observed[~rare], observed[rare].sum().view(1)])
    keep = expected > 0
    if int(keep.sum()) < 2:
        return 1.0
    statistic = ((observed - expected).square()[keep] / expected[keep]).sum()
    return p_value(float(statistic), int(keep.sum()) - 1)


def independence_p_value(first: torch.Tensor, second: torch.Tensor, num_outcomes: int) -> float:
    """Return the p-value of a chi-square test that two series of draws are independent.

    first, second: int64 [n], each uniform over range(num_outcomes).
    """
    pairs = first * num_outcomes + second
    return fit_p_value(pairs, torch.ones(num_outcomes**2))
