"""Draws tokens by given random numbers."""

from __future__ import annotations

import torch


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw an index from each row of weights float [n, vocab], with a probability proportional to its weight: int64
    [n]. Weights are non-negative, and need not be normalized.

    uniform: float64 [n] in [0, 1), random numbers at which the cumulative distribution is inverted.

    A row's index depends on that row and its random number only, and has a positive weight. For a row that is not
    finite or all zero, it is any index.
    """
    cumulative = weights.to(torch.float64).cumsum(-1)
    total = cumulative[:, -1]
    # Rounding must not reach the total itself: past it there is no index, and before it trailing zero weights.
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True).squeeze(-1)
    return index.clamp(max=weights.shape[-1] - 1)
