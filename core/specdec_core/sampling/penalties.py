"""Penalties for tokens that were there before: repetition (prompt and output), frequency and presence (output)."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core.sampling.constraints import ConstrainedRows


def penalise_repetition(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """In place: positive logits of tokens in the history are divided by the penalty, negative ones multiplied."""
    asking = rows.where(lambda c: c.repetition_penalty != 1)
    if asking is None:
        return
    was_there = count_tokens(asking, logits, with_prompt=True) > 0
    penalty = asking.per_row([c.repetition_penalty for c in asking.constraints], logits.dtype)
    before = logits[asking.rows]
    penalised = torch.where(before > 0, before / penalty, before * penalty)
    logits.index_copy_(0, asking.rows, torch.where(was_there, penalised, before))


def penalise_output(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """In place: a token's logit less frequency_penalty for each time that it is in the output, and less
    presence_penalty if it is there at all."""
    asking = rows.where(lambda c: c.counts_output)
    if asking is None:
        return
    counts = count_tokens(asking, logits, with_prompt=False)
    frequency = asking.per_row([c.frequency_penalty for c in asking.constraints], logits.dtype)
    presence = asking.per_row([c.presence_penalty for c in asking.constraints], logits.dtype)
    penalised = logits[asking.rows] - frequency * counts - presence * (counts > 0)
    logits.index_copy_(0, asking.rows, penalised)


def count_tokens(rows: ConstrainedRows, logits: torch.Tensor, *, with_prompt: bool) -> torch.Tensor:
    """[n, vocab], of the type of the logits: how often each token is in each row's history."""
    known = [r.token_ids[0 if with_prompt else r.num_prompt_tokens :] for r in rows.requests]
    owners = rows.to_device(np.repeat(np.arange(len(known)), [len(tokens) for tokens in known]))
    token_ids = rows.to_device(np.concatenate(known))
    counts = logits.new_zeros((len(known), logits.shape[1]))
    counts.index_put_((owners, token_ids), counts.new_ones(()), accumulate=True)
    counts = counts[rows.to_device(rows.owners)]
    # Of a row's own path; -1 stands for no node.
    return counts.scatter_add_(1, rows.path.clamp(min=0), (rows.path >= 0).to(counts.dtype))
