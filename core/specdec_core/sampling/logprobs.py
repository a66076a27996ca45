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
    tensors = (token_ids.unsqueeze(1), own, ranks.unsqueeze(1), best.indices, best.values)
    packed = torch.cat([each.to(torch.float64) for each in tensors], dim=1).tolist()  # one copy to the host
    size = best.indices.shape[1]
    found: list[TokenLogprobs] = []
    for (token_id, logprob, rank, *of_best), number, text_of in zip(packed, numbers, decode, strict=True):
        likely = zip(of_best[:number], of_best[size : size + number], range(1, number + 1), strict=True)
        every = ((int(t), value, int(place)) for t, value, place in [(token_id, logprob, rank), *likely])
        found.append({token: Logprob(value, place, text_of(token)) for token, value, place in every})
    return found
