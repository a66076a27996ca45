"""The sampling parameter structured_outputs: forbids each token that the request's grammar does not allow."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core.sampling.constraints import ConstrainedRows


def follow_grammar(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """In place: in each row of logits, set to -inf each token that the request's grammar does not allow after the
    tokens before it.

    A row whose own draft token is refused stays as it is: that token has probability 0 in its parent's row, so
    verification never gets there. If a grammar fails, the row becomes NaN, and the request fails if verification
    accepts the tokens up to that row.
    """
    vocab_size = logits.shape[1]
    masks = np.full((len(rows.owners), -(-vocab_size // 32)), -1, dtype=np.int32)
    depths, position = (rows.paths.host_token_ids >= 0).sum(axis=1), 0
    failed: list[int] = []
    for request, constraints, count in zip(rows.requests, rows.constraints, rows.counts.tolist(), strict=True):
        own = slice(position, position + count)
        paths = [rows.paths.host_token_ids[row, : depths[row]][::-1].tolist() for row in rows.host_rows[own]]
        assert constraints.grammar is not None, "these are the rows of requests with a grammar"
        faults = constraints.grammar.mask(request.token_ids[request.num_prompt_tokens :], paths, masks[own])
        constraints.fault = faults.get(0, constraints.fault)
        failed += [position + index for index in faults]
        position += count
    is_forbidden = np.unpackbits(~masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(bool)
    kept = logits.index_select(0, rows.rows).masked_fill_(rows.to_device(is_forbidden), -torch.inf)
    if failed:
        kept[failed] = torch.nan
    logits.index_copy_(0, rows.rows, kept)
