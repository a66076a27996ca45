"""Penalties for tokens that occurred before, of all requests that ask for one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from specdec_core.ops.token_counts import TokenCounts
from specdec_core.sampling.constraints import ConstrainedRows


def penalize_history(logits: torch.Tensor, rows: ConstrainedRows, penalize: Callable[..., None]) -> None:
    """In place: apply repetition_penalty, frequency_penalty and presence_penalty to the logits of tokens in each row's
    history. penalize: the operation of this name."""
    counts, new = count_tokens(rows, logits)
    params = [constraints.params for constraints in rows.constraints]
    penalties = np.array([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params], np.float64)
    penalize(logits, rows.path, rows.first_rows, rows.counts.tolist(), penalties, counts, new)


def count_tokens(rows: ConstrainedRows, logits: torch.Tensor) -> tuple[list[TokenCounts], list[np.ndarray]]:
    """Return the counts of the last step, of each request, and the tokens to add to them. The prompt counts only for a
    repetition penalty."""
    counts, new = [], []
    for request, constraints in zip(rows.requests, rows.constraints, strict=True):
        if constraints.token_counts is None:
            start = request.num_prompt_tokens if constraints.params.repetition_penalty == 1 else 0
            constraints.token_counts = TokenCounts(start, logits.shape[1], logits.device)
        counts.append(constraints.token_counts)
        new.append(counts[-1].read(request.token_ids, request.num_prompt_tokens))
    return counts, new
