"""Rules about single tokens, whatever their history: allowed token ids, biases, and no end before min_tokens.

Each changes logits [num_rows, vocab] in place.
"""

from __future__ import annotations

import numpy as np
import torch

from specdec_core.sampling.rules import RuledRows


def keep_allowed(logits: torch.Tensor, rows: RuledRows) -> None:
    """-inf everywhere but at the allowed token ids."""
    asking = rows.where(lambda rules: rules.allowed_ids is not None)
    if asking is None:
        return
    positions, ids = asking.pairs([rules.allowed_ids for rules in asking.rules if rules.allowed_ids is not None])
    allowed = asking.to_device(asking.host_rows[positions]), asking.to_device(ids)
    kept = logits[allowed]
    logits.index_fill_(0, asking.rows, -torch.inf)
    logits.index_put_(allowed, kept)


def forbid_early_end(logits: torch.Tensor, rows: RuledRows) -> None:
    """-inf at the tokens that end a request, where the output would have fewer than min_tokens without them."""
    asking = rows.where(lambda rules: rules.min_tokens > 0)
    if asking is None:
        return
    missing = np.array(
        [
            rules.min_tokens - (len(request.token_ids) - request.num_prompt_tokens)
            for rules, request in zip(asking.rules, asking.requests, strict=True)
        ]
    )
    is_early = asking.depths < asking.to_device(missing[asking.owners])
    positions, ids = asking.pairs([rules.end_ids for rules in asking.rules])
    forbidden = torch.where(is_early, -torch.inf, 0.0).to(logits.dtype)[asking.to_device(positions)]
    at = asking.to_device(asking.host_rows[positions]), asking.to_device(ids)
    logits.index_put_(at, forbidden, accumulate=True)


def add_bias(logits: torch.Tensor, rows: RuledRows) -> None:
    """What is given for a token is added to its logit."""
    asking = rows.where(lambda rules: len(rules.bias_ids) > 0)
    if asking is None:
        return
    positions, ids = asking.pairs([rules.bias_ids for rules in asking.rules])
    _, values = asking.pairs([rules.bias_values for rules in asking.rules])
    at = asking.to_device(asking.host_rows[positions]), asking.to_device(ids)
    logits.index_put_(at, asking.to_device(values).to(logits.dtype), accumulate=True)
