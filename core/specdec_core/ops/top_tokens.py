"""Finds the most likely tokens of each row of logits: the reference operation in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

MostLikely = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def most_likely(logits: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probabilities of the `number` most likely tokens of each row of logits [n, vocab], the most likely
    first, float32 [n, number], and the tokens, int64 [n, number]. There are no more of them than the vocabulary has.

    Which of equally likely tokens come first, and which are left out, is up to the operation, but does not depend on
    other rows. The log probabilities of a row that is not finite are NaN, and its tokens any.
    """
    log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
    best = log_probs.topk(min(number, logits.shape[-1]), dim=-1)
    return best.values, best.indices
