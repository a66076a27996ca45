"""Penalties for tokens that occurred before: repetition (in prompt and output), frequency and presence (in the output).
The reference operation in torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec_core.ops.token_counts import TokenCounts
from specdec_core.ops.upload import upload


def penalize(
    logits: torch.Tensor,
    path: torch.Tensor,
    first_rows: Sequence[int],
    num_rows: Sequence[int],
    penalties: np.ndarray,
    counts: Sequence[TokenCounts],
    new: Sequence[np.ndarray],
) -> None:
    """In place: penalize tokens in the history of rows of some requests: the request's tokens and the draft tokens on
    the row's path, which count as output. A positive logit of a token in the history is divided by the repetition
    penalty, and a negative one is multiplied by it. Then a token in the output loses the frequency penalty for each
    time that it occurs, and the presence penalty once.

    logits: float32 or float64 [all rows, vocab].
    path: int64 [n, max_depth], the draft tokens on the path of each of the n rows, filled up with -1.
    first_rows, num_rows: of each request, the index of its first row in `logits`, and how many rows it has there, one
        after the other; n in all.
    penalties: float64 [num_requests, 3], on the host: repetition (1: none), frequency and presence (0: none).
    counts: of each request, how often tokens occur in it. Its tokens in `new` are added.
    new: of each request, int64 [num_new], on the host: what `TokenCounts.read` returned.
    """
    for each, places in zip(counts, new, strict=True):
        if len(places):
            added = upload(places, logits.device)
            each.counts.view(-1).index_add_(0, added, torch.ones_like(added, dtype=torch.int32))
    by_row = (
        upload(penalties.repeat(num_rows, axis=0), logits.device, logits.dtype).unsqueeze(2).unbind(1)
    )  # 3 x [n, 1]
    tokens = path.clamp(min=0)  # where no node is, token 0 stands, as often as it occurs on the path
    on_path = ((tokens.unsqueeze(2) == tokens.unsqueeze(1)) & (path >= 0).unsqueeze(1)).sum(2)
    end = 0
    for of_request, number, first, given in zip(counts, num_rows, first_rows, penalties.tolist(), strict=True):
        start, end = end, end + number
        own, ids = logits[first : first + number], of_request.ids
        known, below, at = ids.expand(number, -1), tokens[start:end], [each[start:end] for each in by_row]
        before, before_below = own.gather(1, known), own.gather(1, below)
        table = of_request.counts if given[0] != 1 else of_request.counts[1:]
        of_path = table[:, below]
        of_path[-1].add_(on_path[start:end])
        own.scatter_(1, known, _penalized(before, table.index_select(1, ids), at, *given))
        own.scatter_(1, below, _penalized(before_below, of_path, at, *given))


def _penalized(
    logits: torch.Tensor,
    counts: torch.Tensor,
    by_row: Sequence[torch.Tensor],
    repetition: float,
    frequency: float,
    presence: float,
) -> torch.Tensor:
    """Return the new logits of tokens. logits: float [num_rows, k]. counts: int32 [2, k] or [2, num_rows, k], in the
    prompt and in the output; without a repetition penalty, only the latter. by_row: the penalties that
    follow, [num_rows, 1] each, in the dtype of the logits."""
    if repetition != 1:
        changed = torch.where(logits > 0, logits / by_row[0], logits * by_row[0])
        logits = torch.where(counts[0] + counts[1] > 0, changed, logits)
    if frequency or presence:
        in_output = counts[-1].to(logits.dtype)
        logits = logits - by_row[1] * in_output - by_row[2] * (in_output > 0)
    return logits
