"""Medusa heads (Cai et al. 2024, section 2.1)."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import nn
from torch.nn.functional import silu


@frozen
class HeadSizes:
    """The sizes of Medusa heads.

    num_layers: residual layers of each head.
    vocab_size: rows of the output layers.
    num_outputs: how many output layers there are: one for each head; 1 that all share; 0, they use the target's.
    num_mapped: how many of the target's tokens the heads can draft; None: all.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_outputs: int
    has_bias: bool
    num_mapped: int | None = None
    logit_scale: float = 1.0


class MedusaHeads(nn.Module):
    """Head i predicts the token i + 2 places after the one whose hidden state it reads: the target's own output layer
    predicts the next one. No head knows what another one drafts."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        size = sizes.hidden_size
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size, bias=sizes.has_bias) for _ in range(sizes.num_layers))
            for _ in range(sizes.num_heads)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(size, sizes.vocab_size, bias=False) for _ in range(sizes.num_outputs))
        self._logit_scale = sizes.logit_scale

    def hidden(self, i: int, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the input of head i's output layer, [n, hidden_size], from the target's hidden states after its final
        norm, [n, hidden_size]."""
        for layer in self.heads[i]:
            hidden = hidden + silu(layer(hidden))
        return hidden

    def of_all(self, hidden: torch.Tensor, *, num_heads: int) -> tuple[torch.Tensor, ...]:
        """Compute the inputs of the first num_heads heads' output layers, as `hidden` does."""
        return tuple(self.hidden(i, hidden) for i in range(num_heads))

    def logits(self, i: int, hidden: torch.Tensor) -> torch.Tensor:
        """Apply head i's output layer: [n, hidden_size] -> [n, vocab_size]. There must be one."""
        logits: torch.Tensor = self.lm_heads[min(i, len(self.lm_heads) - 1)](hidden)
        return logits if self._logit_scale == 1 else self._logit_scale * logits

    def keep_tokens(self, token_ids: torch.Tensor) -> None:
        """Drop the rows of full output layers but these, int64 [num_mapped]. Layers that lack tokens stay."""
        for layer in self.lm_heads:
            if len(layer.weight) > len(token_ids):
                layer.weight = nn.Parameter(layer.weight[token_ids], requires_grad=False)
                layer.out_features = len(token_ids)
