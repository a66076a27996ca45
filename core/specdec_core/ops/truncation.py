"""Applies temperature and truncations (min-p, top-k, top-p) to logits: the reference operation in torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from specdec_core.ops.upload import upload

LIKELIEST = 256
"""Tokens of a row that top-p sorts first on a CPU. Few rows need more."""


def truncate(
    logits: torch.Tensor, temperature: np.ndarray, min_p: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
) -> torch.Tensor:
    """Return a copy of logits float32 or float64 [num_rows, vocab], divided by the temperature, with -inf for tokens
    that a truncation removes: min_p first, then top_k of what is left, then top_p. Each costs time only for rows that
    ask for it. The parameters are on the host and have an entry per row.

    temperature: float64; 0: a greedy row, which becomes -inf except at the argmax, the first of equal ones, whatever
        the other parameters are.
    min_p: float64; 0: none.
    top_k: int64; 0: none. Ties with the k-th token stay.
    top_p: float64; 1: none. Of tokens that are equally likely as the last that stays, the first ones stay.

    A row with NaN or +inf keeps one, so that the verifier fails the row's request and no other.
    """
    is_greedy = temperature == 0
    processed = logits / _column(np.where(is_greedy, 1, temperature), logits)
    asked: tuple[tuple[np.ndarray, np.ndarray, Callable[[torch.Tensor, np.ndarray], torch.Tensor]], ...] = (
        (~is_greedy & (min_p > 0), min_p, _keep_min_p),
        (~is_greedy & (top_k > 0), top_k, _keep_top_k),
        (~is_greedy & (top_p < 1), top_p, _keep_top_p),
        (is_greedy, temperature, _keep_best),
    )
    for is_asked, values, keep in asked:
        rows = np.flatnonzero(is_asked)
        if len(rows) == len(processed):
            processed = keep(processed, values)
        elif len(rows):
            at = upload(rows, logits.device)
            processed.index_copy_(0, at, keep(processed.index_select(0, at), values[rows]))
    return processed


def _column(values: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1]   one value for each row of logits, in their dtype and on their device."""
    return upload(values, logits.device, logits.dtype).unsqueeze(1)


def _keep_min_p(logits: torch.Tensor, min_p: np.ndarray) -> torch.Tensor:
    """Return a copy of the logits with -inf for each token less likely than min_p [num_rows] times the likeliest
    one."""
    least = logits.amax(dim=-1, keepdim=True) + _column(np.log(min_p), logits)
    return logits.masked_fill(logits < least, -torch.inf)


def _keep_top_k(logits: torch.Tensor, k: np.ndarray) -> torch.Tensor:
    """Return a copy of the logits with -inf for all but the k likeliest tokens and ties with the k-th. k: int64
    [num_rows], at least 1."""
    k = k.clip(max=logits.shape[-1])
    last = upload(k - 1, logits.device).unsqueeze(1)
    least = logits.topk(int(k.max()), dim=-1).values.gather(1, last)
    return logits.masked_fill(logits < least, -torch.inf)


def _keep_top_p(logits: torch.Tensor, top_p: np.ndarray) -> torch.Tensor:
    """Return a copy of the logits with -inf for all but the smallest set of likeliest tokens whose probability reaches
    top_p [num_rows], below 1."""
    vocab_size = logits.shape[-1]
    # On a GPU, sorting is cheaper than to wait for the answer whether it is needed.
    size = min(LIKELIEST, vocab_size) if logits.device.type == "cpu" else vocab_size
    least, num_least, is_enough = _cut_at(logits, top_p, size)
    if size < vocab_size and not is_enough.all():
        rows = (~is_enough).nonzero().squeeze(1)
        least[rows], num_least[rows], _ = _cut_at(logits[rows], top_p[rows.numpy()], vocab_size)
    is_least = logits == least
    is_dropped = (logits < least) | (is_least & (is_least.cumsum(dim=-1, dtype=torch.int32) > num_least))
    return logits.masked_fill(is_dropped, -torch.inf)


def _cut_at(logits: torch.Tensor, top_p: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find where top-p cuts each row, by sorting its `size` likeliest tokens.

    Returns the least logit that stays, [num_rows, 1], how many tokens with this logit stay, the first ones, int64
    [num_rows, 1], and for which rows `size` was enough, bool [num_rows].
    """
    best, order = logits.topk(size) if size < logits.shape[-1] else logits.sort(descending=True)
    probs = logits.softmax(dim=-1).gather(1, order)
    num_kept = (probs.cumsum(dim=-1) - probs < _column(top_p, logits)).sum(dim=-1, keepdim=True).clamp_(min=1)
    least = best.gather(1, num_kept - 1)
    return least, num_kept - (best > least).sum(dim=-1, keepdim=True), num_kept.squeeze(1) < size


def _keep_best(logits: torch.Tensor, _: np.ndarray) -> torch.Tensor:
    """Return a copy of the logits with -inf for all tokens but the argmax, the first of equal ones. In a row with NaN
    that is a NaN, so that the verifier fails the row's request and no other."""
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.full_like(logits, -torch.inf).scatter_(1, best, logits.gather(1, best))
