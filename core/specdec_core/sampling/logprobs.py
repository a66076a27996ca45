"""Log probabilities of tokens under the target's raw logits, before any sampling parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen


@frozen
class Logprob:
    """A token's log probability under the target's raw logits, its rank (1: the likeliest; equal probabilities share
    the worse rank) and its text. decoded_token is None without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Logprobs at one position: first the token itself, then the likeliest tokens in order."""


def logprobs_of(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_logprobs: Sequence[int],
    decode: Sequence[Callable[[int], str | None]],
) -> list[TokenLogprobs]:
    """The log probabilities of the generated token and of the likeliest tokens at each row of logits.

    logits: [n, vocab], the target's, unprocessed.
    token_ids: int64 [n], the tokens that were generated.
    num_logprobs: [n], how many of the likeliest tokens to add; -1: all.
    decode: [n], functions from a token id to its text.
    """
    vocab_size = logits.shape[1]
    numbers = [vocab_size if n < 0 else n for n in num_logprobs]
    logprobs = logits.log_softmax(-1, dtype=None if logits.dtype == torch.float64 else torch.float32)
    own = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs >= own).sum(dim=1)
    best = logprobs.topk(max(numbers, default=0), dim=1)
    tensors = (token_ids, own.squeeze(1), ranks, best.indices, best.values)
    rows = zip(*(each.tolist() for each in tensors), numbers, decode, strict=True)
    found: list[TokenLogprobs] = []
    for token_id, logprob, rank, best_ids, best_logprobs, number, text_of in rows:
        likely = list(zip(best_ids[:number], best_logprobs[:number], range(1, number + 1), strict=True))
        found.append({t: Logprob(value, place, text_of(t)) for t, value, place in [(token_id, logprob, rank), *likely]})
    return found
