"""The training-time test (Li et al. 2025, section 3.2): a head is trained on its own outputs, which are also its inputs
when it drafts.

At step k, the head's input at position i of a text is the embedding of token i + 1 + k (teacher forcing) and the head's
own output for position i at step k - 1. This is the input of the draft token at depth k in a draft that begins at
position i, so the rotary position is i + k. Position i attends to the keys of step 0 up to position i, which the KV
cache would hold, and to its own keys of steps 1 to k, which are those of the draft token and its ancestors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

RunHead = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""As `FeatureProposer.run` without `rows`: called with embeddings and features [n, hidden] and positions int64 [n]."""


class SlotAttention:
    """Attention of the training-time test over a batch of texts, [batch, length]. A head calls `attend` once in each
    layer at each step, and the object keeps the keys and values of all steps so far."""

    def __init__(self, batch: int, length: int) -> None:
        self._shape = batch, length
        self._stored: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by layer, a pair for each step

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        rows: None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Compute one layer's attention, as `LayerAttention.attend` does for drafts.

        query, key, value: [batch * length, heads, head_dim].
        rows: None: all positions attend.
        scale: of the products of queries and keys; None: 1 / sqrt(head_dim).

        Returns [batch * length, heads, head_dim].
        """
        num_shared = query.shape[1] // key.shape[1]
        query, key, value = (x.reshape(*self._shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        key, value = (x.repeat_interleave(num_shared, dim=1) for x in (key, value))
        steps = self._stored.setdefault(layer, [])
        steps.append((key, value))
        if len(steps) == 1:
            attended = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        else:
            attended = self._attend_own(query * (query.shape[-1] ** -0.5 if scale is None else scale), steps)
        return attended.transpose(1, 2).flatten(0, 1)

    def _attend_own(self, query: torch.Tensor, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Compute attention at any step after the first. Each position attends to the first step's keys up to the
        position itself, and to its own keys of the later steps.

        query: [batch, num_heads, length, head_dim], scaled; the result has the same layout.
        steps: the (key, value) pair of each step so far, in the same layout.
        """
        (key, value), *later = steps
        length = query.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        seen = (query @ key.transpose(-1, -2)).masked_fill(future, -torch.inf)
        own = torch.stack([(query * its_key).sum(-1) for its_key, _ in later], dim=-1)
        weights = torch.cat([seen, own.to(seen.dtype)], dim=-1).softmax(-1, dtype=torch.float32).to(value.dtype)
        attended = weights[..., :length] @ value
        for j, (_, its_value) in enumerate(later):
            attended = attended + weights[..., length + j, None] * its_value
        return attended


def unroll(
    run: RunHead,
    embed: Callable[[torch.Tensor], torch.Tensor],
    token_ids: torch.Tensor,
    features: torch.Tensor,
    num_steps: int,
) -> Iterator[torch.Tensor]:
    """Run the training-time test. Yields, for each step, the inputs of the head's LM head, [batch, length, hidden].

    At the last 1 + step positions of each text the result is meaningless, since these positions need embeddings of
    tokens beyond the text's end.

    run: the head. Its attention is that of one `SlotAttention` of the texts' shape.
    embed: a function from token ids to embeddings.
    token_ids: int64 [batch, length].
    features: [batch, length, hidden], those of the texts' tokens.
    num_steps: number of steps of the training-time test.
    """
    batch, length = token_ids.shape
    positions = torch.arange(length, device=token_ids.device).repeat(batch)
    feature = features.flatten(0, 1)
    for step in range(min(num_steps, length)):
        following = pad(token_ids[:, 1 + step :], (0, 1 + step))
        output, feature = run(embed(following).flatten(0, 1).to(features.dtype), feature, positions + step)
        yield output.view(batch, length, -1)


def step_weight(counts: torch.Tensor, step: int) -> torch.Tensor:
    """Return the weight of each position's loss at a step of the training-time test, float32 [batch, length - 1 -
    step].

    Position i predicts token i + 2 + step. Its weight is 0 if this token is masked or does not exist, as at the last
    position. The other positions have equal weights with the sum 1.

    counts: bool [batch, length], False for masked tokens.
    """
    weight = torch.zeros_like(counts[:, 1 + step :], dtype=torch.float32)
    weight[:, :-1] = counts[:, 2 + step :]
    return weight / weight.sum().clamp(min=1)
