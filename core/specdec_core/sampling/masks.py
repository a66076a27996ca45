"""Rules about single tokens, whatever their history: allowed token ids, biases, and no end before min_tokens.

Each changes logits [num_rows, vocab] in place.
"""

from __future__ import annotations

import numpy as np
import torch

from specdec_core.sampling.constraints import ConstrainedRows


def keep_allowed(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """-inf everywhere but at the allowed token ids."""
    asking = rows.where(lambda c: c.allowed_ids is not None)
    if asking is None:
        return
    positions, ids = asking.pairs([c.allowed_ids for c in asking.constraints if c.allowed_ids is not None])
    allowed = asking.to_device(asking.host_rows[positions]), asking.to_device(ids)
    kept = logits[allowed]
    logits.index_fill_(0, asking.rows, -torch.inf)
    logits.index_put_(allowed, kept)


def forbid_early_end(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """-inf at the tokens that end a request, where the output would have fewer than min_tokens without them."""
    asking = rows.where(lambda c: c.min_tokens > 0)
    if asking is None:
        return
    missing = np.array(
        [
            constraints.min_tokens - (len(request.token_ids) - request.num_prompt_tokens)
            for constraints, request in zip(asking.constraints, asking.requests, strict=True)
        ]
    )
    is_early = asking.depths < asking.to_device(missing[asking.owners])
    positions, ids = asking.pairs([c.end_ids for c in asking.constraints])
    forbidden = torch.where(is_early, -torch.inf, 0.0).to(logits.dtype)[asking.to_device(positions)]
    at = asking.to_device(asking.host_rows[positions]), asking.to_device(ids)
    logits.index_put_(at, forbidden, accumulate=True)


def add_bias(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """What is given for a token is added to its logit."""
    asking = rows.where(lambda c: len(c.bias_ids) > 0)
    if asking is None:
        return
    positions, ids = asking.pairs([c.bias_ids for c in asking.constraints])
    _, values = asking.pairs([c.bias_values for c in asking.constraints])
    at = asking.to_device(asking.host_rows[positions]), asking.to_device(ids)
    logits.index_put_(at, asking.to_device(values).to(logits.dtype), accumulate=True)
