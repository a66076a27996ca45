"""The network of an MLP speculator (Wertheimer et al. 2024, section 3)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import gelu

from specdec_proposer_mlp.head_config import SpeculatorConfig

EPS = 1e-6


def rms_normed(hidden: torch.Tensor) -> torch.Tensor:
    """Divide each row by its root mean square, in float32 or a more exact dtype."""
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + EPS)


class Norm(nn.Module):
    """An RMS norm with a bias. It is called `ln` in checkpoints, but subtracts no mean."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (self.weight * rms_normed(hidden) + self.bias).to(hidden.dtype)


class Speculator(nn.Module):
    """Drafts one token with each of its heads, from the target's hidden state and the tokens drafted so far.

    Head i reads the state that head i - 1 left and the token that was drafted last, and updates the state. A module
    with tied weights has fewer modules than heads: the last one of each kind serves all further heads.
    """

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__()
        size, num_heads = config.inner_dim, config.n_predict
        num_own = 1 if config.tie_weights else num_heads
        self.emb = nn.ModuleList(nn.Embedding(config.vocab_size, size) for _ in range(num_own))
        self.proj = nn.ModuleList([nn.Linear(config.emb_dim, size, bias=False)])
        num_later = min(num_heads - 1, 1) if config.tie_weights else num_heads - 1
        self.proj.extend(nn.Linear(size, size, bias=False) for _ in range(num_later))
        self.head = nn.ModuleList(nn.Linear(size, config.vocab_size, bias=False) for _ in range(num_own))
        self.ln = nn.ModuleList(Norm(size) for _ in range(num_own))
        self._scale_input = config.scale_input
        # The state's share of the sum falls to a half after all heads, if both parts have unit variance.
        state_weight = 0.5 ** (0.5 / num_heads)
        self._token_weight = ((1 - state_weight**2) * size / 2) ** 0.5 / state_weight

    def first_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state before the first head, [n, emb_dim], from the target's hidden states after its final norm."""
        return (rms_normed(hidden) / 2**0.5).to(hidden.dtype) if self._scale_input else hidden

    def next_state(self, i: int, state: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The state that head i leaves, [n, inner_dim]. state, token_ids: as for `forward`."""
        emb, proj, ln = (each[min(i, len(each) - 1)] for each in (self.emb, self.proj, self.ln))
        return gelu(ln(proj(state) + self._token_weight * emb(token_ids)))

    def logits(self, i: int, state: torch.Tensor) -> torch.Tensor:
        """The logits of head i, [n, vocab], from the state that it left, [n, inner_dim]."""
        logits: torch.Tensor = self.head[min(i, len(self.head) - 1)](state)
        return logits

    def forward(self, i: int, state: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run head i.

        state: [n, emb_dim] for the first head, later [n, inner_dim], the state that the head before returned.
        token_ids: int64 [n], the token before the one to draft: for the first head the request's last token.

        Returns the new state, [n, inner_dim], and logits [n, vocab].
        """
        state = self.next_state(i, state, token_ids)
        return state, self.logits(i, state)
