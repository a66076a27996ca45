"""The training-time test (Li et al. 2025, section 3.2): in training a head drafts from its own outputs, as it will.

At step k, slot i has the embedding of token i + 1 + k, teacher-forced, and as its feature the output of slot i at the
step before. It stands for the node at depth k of the draft that would begin at slot i, so its rotary position is i + k,
and of the keys it sees step 0's up to slot i, which are what the cache would have, and those of slot i at steps 1 to k,
which are its ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from specdec_proposer_eagle.modules import Head


class SlotAttention:
    """Attention of all slots of [batch, length] texts, step after step: `attend` is what `Head` asks for."""

    def __init__(self, batch: int, length: int) -> None:
        self._shape = batch, length
        self._stored: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by layer, of each step

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, rows: None = None
    ) -> torch.Tensor:
        num_shared = query.shape[1] // key.shape[1]
        query, key, value = (x.unflatten(0, self._shape).transpose(1, 2) for x in (query, key, value))
        key, value = (x.repeat_interleave(num_shared, dim=1) for x in (key, value))
        steps = self._stored.setdefault(layer, [])
        steps.append((key, value))
        if len(steps) == 1:
            attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            attended = self._attend_own(query, steps)
        return attended.transpose(1, 2).flatten(0, 1)

    def _attend_own(self, query: torch.Tensor, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """query: [batch, num_heads, length, head_dim], as is the result."""
        (key, value), *later = steps
        length = query.shape[2]
        query = query * query.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        seen = (query @ key.transpose(-1, -2)).masked_fill(future, -torch.inf)
        own = torch.stack([(query * its_key).sum(-1) for its_key, _ in later], dim=-1)
        weights = torch.cat([seen, own.to(seen.dtype)], dim=-1).softmax(-1, dtype=torch.float32).to(value.dtype)
        attended = weights[..., :length] @ value
        for j, (_, its_value) in enumerate(later):
            attended = attended + weights[..., length + j, None] * its_value
        return attended


def unroll(
    head: Head,
    embed: Callable[[torch.Tensor], torch.Tensor],
    token_ids: torch.Tensor,
    features: torch.Tensor,
    num_steps: int,
) -> Iterator[torch.Tensor]:
    """What the head's output layer takes at each step: [batch, length, hidden], of which the last 1 + step slots of a
    text mean nothing, since the token they embed is not in it.

    token_ids: int64 [batch, length]. features: [batch, length, hidden], as `Head.fused` gives them.
    """
    batch, length = token_ids.shape
    attention = SlotAttention(batch, length)
    positions = torch.arange(length, device=token_ids.device).repeat(batch)
    feature = features.flatten(0, 1)
    for step in range(min(num_steps, length)):
        following = pad(token_ids[:, 1 + step :], (0, 1 + step))
        embedded = embed(following).flatten(0, 1).to(features.dtype)
        rotation = head.rotation(positions + step, feature.dtype)
        output, feature = head(embedded, feature, rotation, attention.attend)
        yield output.unflatten(0, (batch, length))
