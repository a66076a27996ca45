"""The draft model of the test proposer in probe_draft.py: one decoder layer, written here or taken from transformers.

Its number of heads and its widths differ from the target's. Its random weights are large, so that a wrong attention
mask, KV-cache slot or position changes its draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

from specdec_core.contracts.proposer import LayerAttention

NUM_HEADS, NUM_KV_HEADS, KEY_DIM, VALUE_DIM = 6, 3, 8, 12
LLAMA_HEADS, LLAMA_KV_HEADS, LLAMA_DIM = 2, 1, 10
ROTARY_BASE = 100.0
COPIED = 3.0

Layer = Callable[[torch.Tensor, torch.Tensor, LayerAttention], torch.Tensor]


def norm(hidden: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden, hidden.shape[-1:], eps=1e-6)


class OwnLayer(nn.Module):
    """A layer that calls `LayerAttention.attend` itself. Its keys and values differ in width."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden_size, NUM_HEADS * KEY_DIM, bias=False)
        self.key = nn.Linear(hidden_size, NUM_KV_HEADS * KEY_DIM, bias=False)
        self.value = nn.Linear(hidden_size, NUM_KV_HEADS * VALUE_DIM, bias=False)
        self.output = nn.Linear(NUM_HEADS * VALUE_DIM, hidden_size, bias=False)
        self.up = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.down = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
        normed = norm(hidden)
        query = rotated(self.query(normed).unflatten(-1, (NUM_HEADS, KEY_DIM)), positions)
        key = rotated(self.key(normed).unflatten(-1, (NUM_KV_HEADS, KEY_DIM)), positions)
        value = self.value(normed).unflatten(-1, (NUM_KV_HEADS, VALUE_DIM))
        hidden = hidden + self.output(attention.attend(0, query, key, value).flatten(-2))
        return hidden + self.down(silu(self.up(norm(hidden))))


def rotated(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding to queries or keys [num_tokens, n, width] at positions [num_tokens]. Neighboring elements
    form a pair."""
    width = heads.shape[-1]
    frequencies = ROTARY_BASE ** (torch.arange(0, width, 2, device=heads.device) / -width)
    angles = positions.unsqueeze(-1) * frequencies
    turned = torch.view_as_complex(heads.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(turned).flatten(-2)


class LlamaLayer(nn.Module):
    """A decoder layer from transformers, whose attention uses the proposer's KV cache."""

    def __init__(self, hidden_size: int, implementation: str) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        config = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_attention_heads=LLAMA_HEADS,
            num_key_value_heads=LLAMA_KV_HEADS,
            head_dim=LLAMA_DIM,
        )
        config._attn_implementation = implementation
        self.layer = LlamaDecoderLayer(config, layer_idx=0)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
        hidden, positions = hidden.unsqueeze(0), positions.unsqueeze(0)
        return self.layer(hidden, position_embeddings=self.rotary(hidden, positions), attention_mask=None)[0]


class ProbeModel(nn.Module):
    """A draft model of two linear layers and one decoder layer.

    layer: the decoder layer: "own" (OwnLayer) or "llama" (LlamaLayer).
    fuse: the linear layer that combines three hidden states of the target into one feature vector.
    enter: the linear layer from an input embedding and a feature vector, concatenated, to the decoder layer's input.
    """

    def __init__(self, layer: str, hidden_size: int, implementation: str) -> None:
        super().__init__()
        self.fuse = nn.Linear(3 * hidden_size, hidden_size, bias=False)
        self.enter = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = OwnLayer(hidden_size) if layer == "own" else LlamaLayer(hidden_size, implementation)
        generator = torch.Generator().manual_seed(5)
        for weight in self.parameters():
            if weight.dim() == 2 and not weight.is_meta:
                weight.data.normal_(std=1.3 * weight.shape[1] ** -0.5, generator=generator)
        if not self.enter.weight.is_meta:  # the embedding of the last token weighs most, as in the target
            self.enter.weight.data[:, :hidden_size] += COPIED * torch.eye(hidden_size)
        self.requires_grad_(False)

    def forward(
        self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor, attention: LayerAttention
    ) -> torch.Tensor:
        """Run the draft model on input embeddings and features [num_tokens, hidden] at positions [num_tokens].

        Returns the decoder layer's output [num_tokens, hidden].
        """
        hidden = self.enter(torch.cat([norm(embedded), norm(feature)], dim=-1))
        return self.layer(hidden, positions, attention)
