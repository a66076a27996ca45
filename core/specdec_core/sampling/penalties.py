"""Penalties for tokens that occurred before: repetition (in prompt and output), frequency and presence (in the
output)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec_core.sampling.constraints import ConstrainedRows
from specdec_core.sampling.token_counts import TokenCounts


def penalize_repetition(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """In place: divide positive logits of tokens in a row's history by repetition_penalty, and multiply negative
    ones."""
    penalties = rows.per_row([c.params.repetition_penalty for c in rows.constraints], logits.dtype)

    def penalized(before: torch.Tensor, counts: torch.Tensor, at: slice) -> torch.Tensor:
        penalty = penalties[at]
        return torch.where(counts > 0, torch.where(before > 0, before / penalty, before * penalty), before)

    _penalize(logits, rows, count_tokens(rows, logits, with_prompt=True), penalized)


def penalize_output(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """In place: lower the logit of each token in the output, by frequency_penalty for each occurrence and by
    presence_penalty once."""
    frequency = rows.per_row([c.params.frequency_penalty for c in rows.constraints], logits.dtype)
    presence = rows.per_row([c.params.presence_penalty for c in rows.constraints], logits.dtype)

    def penalized(before: torch.Tensor, counts: torch.Tensor, at: slice) -> torch.Tensor:
        return before - frequency[at] * counts - presence[at] * (counts > 0)

    _penalize(logits, rows, count_tokens(rows, logits, with_prompt=False), penalized)


def count_tokens(rows: ConstrainedRows, logits: torch.Tensor, *, with_prompt: bool) -> list[TokenCounts]:
    """Count how often each token occurs in each request: in the output and, with_prompt, the prompt. The counts of the
    last step are brought up to date."""
    found: list[TokenCounts] = []
    for request, constraints in zip(rows.requests, rows.constraints, strict=True):
        start = 0 if with_prompt else request.num_prompt_tokens
        if start not in constraints.token_counts:
            constraints.token_counts[start] = TokenCounts(start, logits.shape[1], logits.device)
        found.append(constraints.token_counts[start])
        found[-1].read(request.token_ids)
    return found


def _penalize(
    logits: torch.Tensor,
    rows: ConstrainedRows,
    of_requests: Sequence[TokenCounts],
    penalized: Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor],
) -> None:
    """In place: replace the logits of the tokens in each row's history, which are the request's tokens and the draft
    tokens on the row's path.

    penalized: returns the new logits, given logits [num, k], how often their tokens occur in the row's history ([k] or
        [num, k], in the dtype of the logits; 0: leave the logit as it is) and which of `rows` these are.
    """
    path = rows.path.clamp(min=0)  # where no node is, token 0 stands, as often as it occurs on the path
    on_path = ((path.unsqueeze(2) == path.unsqueeze(1)) & (rows.path >= 0).unsqueeze(1)).sum(2)
    ends = np.cumsum(rows.counts).tolist()
    for of_request, end, num_rows, first in zip(of_requests, ends, rows.counts, rows.first_rows, strict=True):
        at = slice(end - num_rows, end)
        own = logits[first : first + num_rows]
        ids, tokens = of_request.ids.expand(num_rows, -1), path[at]
        below = own.gather(1, tokens)
        times = of_request.counts[of_request.ids].to(logits.dtype)
        own.scatter_(1, ids, penalized(own.gather(1, ids), times, at))
        own.scatter_(1, tokens, penalized(below, (of_request.counts[tokens] + on_path[at]).to(logits.dtype), at))
