"""The draft distributions of a batch, from which sampled draft tokens are drawn."""

from __future__ import annotations

from typing import TypedDict, TypeVar

import numpy as np
import torch

from specdec_core.config.draft_options import AUTO, PROBABILISTIC
from specdec_core.contracts.proposer import ProposerBatch
from specdec_core.contracts.verifier import RandomSource, Stream
from specdec_core.ops.top_tokens import MostLikely, most_likely
from specdec_core.ops.upload import upload

Ids = TypeVar("Ids", torch.Tensor, np.ndarray)


class DraftFields(TypedDict):
    """The fields of `Draft` about its distributions."""

    q: torch.Tensor | None
    q_to_target: torch.Tensor | None
    q_ids: torch.Tensor | None
    with_replacement: bool


class Distributions:
    """Knows the requests whose tokens are drawn, and keeps the rows of `q` that they are drawn from.

    method, q_to_target: see `DraftBuilder`.

    Attributes: q_to_target, as given. is_sampled bool [batch], the requests whose tokens are drawn. draws: whether
    tokens of any request are drawn. draws_all: whether those of every request are.
    """

    def __init__(self, batch: ProposerBatch, method: str, q_to_target: torch.Tensor | None) -> None:
        self._temperature, self.q_to_target = batch.temperature, q_to_target
        self._q: list[torch.Tensor] = []
        self._requests: list[torch.Tensor] = []  # of each row of q
        if draws_some(batch, method):
            self.is_sampled = upload(batch.may_sample, batch.temperature.device)
            self.draws, self.draws_all = True, all(batch.may_sample)
        elif method == PROBABILISTIC:
            is_sampled = [temperature > 0 for temperature in batch.host_temperature or batch.temperature.tolist()]
            self.is_sampled = upload(is_sampled, batch.temperature.device, torch.bool)
            self.draws, self.draws_all = any(is_sampled), all(is_sampled)
        else:
            self.is_sampled = torch.zeros_like(batch.temperature, dtype=torch.bool)
            self.draws = self.draws_all = False

    def probs(self, logits: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of the next tokens, float32 [n, draft_vocab]: at its temperature for a request whose
        tokens are drawn, else at 1. A row of logits that is not finite gives NaN.

        logits: float [n, draft_vocab]. requests: int64 [n].
        """
        if not self.draws:
            return logits.softmax(dim=-1, dtype=torch.float32)
        temperature = self._temperature.masked_fill(~self.is_sampled, 1)
        return (logits.float() / temperature[requests].unsqueeze(1)).softmax(dim=-1)

    def add(self, q: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """Keep rows of `q`, float32 [n, draft_vocab], those of `requests`, int64 [n]. Returns their numbers, int64
        [n]."""
        first = sum(map(len, self._q))
        self._q.append(q)
        self._requests.append(requests)
        return torch.arange(first, first + len(q), device=q.device)

    def to_target(self, requests: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's ids of draft token ids [n]. requests: int64 [n]."""
        return to_target(self.q_to_target, requests, token_ids)

    def fields(self) -> DraftFields:
        """Return what a `Draft` says of its distributions."""
        if not self._q:
            return DraftFields(q=None, q_to_target=None, q_ids=None, with_replacement=False)
        q, table = torch.cat(self._q), self.q_to_target
        if table is None or table.dim() == 1:
            return DraftFields(q=q, q_to_target=table, q_ids=None, with_replacement=False)
        return DraftFields(q=q, q_to_target=None, q_ids=table[torch.cat(self._requests)], with_replacement=False)


def draw_children(
    random: RandomSource, left: torch.Tensor, requests: torch.Tensor, keys: torch.Tensor, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens without replacement from each row of `left`, probabilities [n, draft_vocab]. Returns the tokens,
    int64 [n, number], and a bool of this shape that is False where no token was left.

    requests: int64 [n], indices into the batch.
    keys: int64 [n], the random-number key of each row's first draw; later draws count up from it.
    """
    drawn: list[torch.Tensor] = []
    is_drawn: list[torch.Tensor] = []
    for child in range(number):
        if child:
            left = left.scatter(1, drawn[-1].unsqueeze(1), 0)
        is_drawn.append(left.sum(dim=-1) > 0)
        drawn.append(random.categorical(left, Stream.DRAFT, requests, keys + child))
    return torch.stack(drawn, dim=1), torch.stack(is_drawn, dim=1)


def most_likely_of(batch: ProposerBatch) -> MostLikely:
    """Return the operation `most_likely` for a batch: it finds the most likely tokens of each row of logits, with their
    log probabilities."""
    return batch.most_likely or most_likely


def draws_some(batch: ProposerBatch, method: str) -> bool:
    """Whether method "auto" draws tokens in this batch: it does if a request has a temperature above 0 and no seed."""
    return method == AUTO and any(batch.may_sample)


def to_target(table: Ids | None, requests: Ids, token_ids: Ids) -> Ids:
    """Return the target's ids of draft token ids, int64, in their shape.

    table: int64 [draft_vocab], or [batch, draft_vocab] with the ids of each request; None: they are the same.
    requests: int64, the request of each id, in a shape that broadcasts to that of `token_ids`.
    """
    if table is None:
        return token_ids
    found: Ids = table[token_ids] if table.ndim == 1 else table[requests, token_ids]
    return found
