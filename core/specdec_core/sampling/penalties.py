"""Penalties for tokens that occurred before: repetition (in prompt and output), frequency and presence (in the
output)."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core.sampling.constraints import ConstrainedRows


def penalize_repetition(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """In place: divide positive logits of tokens in a row's history by repetition_penalty, and multiply negative
    ones."""
    was_there = count_tokens(rows, logits, with_prompt=True) > 0
    penalty = rows.per_row([c.params.repetition_penalty for c in rows.constraints], logits.dtype)
    before = logits[rows.rows]
    penalized = torch.where(before > 0, before / penalty, before * penalty)
    logits.index_copy_(0, rows.rows, torch.where(was_there, penalized, before))


def penalize_output(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """In place: lower the logit of each token in the output, by frequency_penalty for each occurrence and by
    presence_penalty once."""
    counts = count_tokens(rows, logits, with_prompt=False)
    frequency = rows.per_row([c.params.frequency_penalty for c in rows.constraints], logits.dtype)
    presence = rows.per_row([c.params.presence_penalty for c in rows.constraints], logits.dtype)
    penalized = logits[rows.rows] - frequency * counts - presence * (counts > 0)
    logits.index_copy_(0, rows.rows, penalized)


def count_tokens(rows: ConstrainedRows, logits: torch.Tensor, *, with_prompt: bool) -> torch.Tensor:
    """Count how often each token occurs in each row's history: the output, the draft tokens on the row's path and,
    with_prompt, the prompt. Returns [n, vocab], in the dtype of the logits."""
    known = [r.token_ids[0 if with_prompt else r.num_prompt_tokens :] for r in rows.requests]
    owners = rows.to_device(np.repeat(np.arange(len(known)), [len(tokens) for tokens in known]))
    token_ids = rows.to_device(np.concatenate(known))
    counts = logits.new_zeros((len(known), logits.shape[1]))
    counts.index_put_((owners, token_ids), counts.new_ones(()), accumulate=True)
    counts = counts[rows.to_device(rows.owners)]
    # Of a row's own path; -1 stands for no node.
    return counts.scatter_add_(1, rows.path.clamp(min=0), (rows.path >= 0).to(counts.dtype))
