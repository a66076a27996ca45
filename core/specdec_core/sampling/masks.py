"""Rules about single tokens, whatever their history: allowed token ids, biases, and no end before min_tokens.

Each changes logits [num_rows, vocab] in place.
"""

from __future__ import annotations

import numpy as np
import torch

from specdec_core.sampling.constraints import ConstrainedRows


def keep_allowed(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """-inf everywhere but at the allowed token ids."""
    positions, ids = rows.pairs([c.allowed_ids for c in rows.constraints if c.allowed_ids is not None])
    allowed = rows.to_device(rows.host_rows[positions]), rows.to_device(ids)
    kept = logits[allowed]
    logits.index_fill_(0, rows.rows, -torch.inf)
    logits.index_put_(allowed, kept)


def forbid_early_end(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """-inf at the tokens that end a request, where the output would have fewer than min_tokens without them."""
    least = np.array([c.min_tokens for c in rows.constraints])
    missing = least - [len(request.token_ids) - request.num_prompt_tokens for request in rows.requests]
    is_early = rows.depths < rows.to_device(missing[rows.owners])
    positions, ids = rows.pairs([c.end_ids for c in rows.constraints])
    forbidden = torch.where(is_early, -torch.inf, 0.0).to(logits.dtype)[rows.to_device(positions)]
    at = rows.to_device(rows.host_rows[positions]), rows.to_device(ids)
    logits.index_put_(at, forbidden, accumulate=True)


def add_bias(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """What is given for a token is added to its logit."""
    positions, ids = rows.pairs([c.bias_ids for c in rows.constraints])
    _, values = rows.pairs([c.bias_values for c in rows.constraints])
    at = rows.to_device(rows.host_rows[positions]), rows.to_device(ids)
    logits.index_put_(at, rows.to_device(values).to(logits.dtype), accumulate=True)
