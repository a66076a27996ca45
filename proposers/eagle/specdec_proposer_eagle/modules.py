"""The draft heads of EAGLE (Li et al. 2024) and EAGLE-3 (Li et al. 2025) as torch modules.

The tokens of all requests form a flat batch, [num_tokens, ...]. The modules hold no KV cache: the function `attend`,
which they get as an argument, stores keys and values and computes attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from specdec_core import DecoderLayer, DecoderStack, Linears, Norm
from specdec_proposer_eagle.head_config import HeadConfig

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [n, head_dim] each, of n tokens or positions."""
Attend = Callable[..., torch.Tensor]
"""`LayerAttention.attend`: (layer, query [n, num_heads, head_dim], key and value [n, num_kv_heads, head_dim], rows)."""
Rows = torch.Tensor | None
"""int64 [n]: tokens whose outputs are computed; None: all."""


class Attention(nn.Module):
    def __init__(self, head: HeadConfig, layer: int, input_size: int) -> None:
        super().__init__()
        config, name = head.layer, f"layers.{layer}.self_attn"
        self._layer, self._head_dim = layer, config.head_dim
        sizes = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        for kind, num_heads in sizes.items():
            bias = head.has(f"{name}.{kind}_proj.bias")
            self.add_module(f"{kind}_proj", nn.Linear(input_size, num_heads * config.head_dim, bias=bias))
        width = config.num_attention_heads * config.head_dim
        self.o_proj = nn.Linear(width, config.hidden_size, bias=head.has(f"{name}.o_proj.bias"))
        has_norms = head.has(f"{name}.q_norm.weight")
        self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if has_norms else nn.Identity()
        self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if has_norms else nn.Identity()

    def forward(self, hidden: torch.Tensor, rotation: Rotation, attend: Attend, rows: Rows) -> torch.Tensor:
        query, key, value = (
            projected(hidden).unflatten(-1, (-1, self._head_dim))
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (heads.transpose(0, 1).unsqueeze(0) for heads in (self.q_norm(query), self.k_norm(key)))
        query, key = apply_rotary_pos_emb(query, key, *(table.unsqueeze(0) for table in rotation))
        attended = attend(self._layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value, rows=rows)
        return self.o_proj(attended.flatten(-2))


class Layer(nn.Module):
    """A decoder layer of an EAGLE head. In EAGLE-3, the first layer's input is the token's embedding and the hidden
    state, concatenated. In EAGLE-1 and -2, the first layer has no input norm."""

    def __init__(self, head: HeadConfig, layer: int) -> None:
        super().__init__()
        size, eps = head.layer.hidden_size, head.layer.rms_norm_eps
        self.takes_both, self._config = head.is_eagle3 and layer == 0, head.layer
        self._norms_residual = self.takes_both and head.norm_before_residual
        self.self_attn = Attention(head, layer, 2 * size if self.takes_both else size)
        self.input_layernorm = LlamaRMSNorm(size, eps) if head.is_eagle3 or layer > 0 else nn.Identity()
        self.hidden_norm = LlamaRMSNorm(size, eps) if self.takes_both else nn.Identity()
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(head.layer)

    def residual(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the residual connection, which attention's input is computed from."""
        return self.hidden_norm(hidden) if self._norms_residual else hidden

    def _norms(self) -> tuple[nn.Module | None, nn.Module]:
        """Return the norm of the embedding, None if attention does not read the embedding, and that of what `residual`
        returns."""
        if not self.takes_both:
            return None, self.input_layernorm
        return self.input_layernorm, nn.Identity() if self._norms_residual else self.hidden_norm

    def described(self) -> DecoderLayer:
        """Return what `forward` computes, as data, from the result of `residual` on."""
        config, attention, mlp = self._config, self.self_attn, self.mlp
        of_embedding, of_residual = self._norms()
        return DecoderLayer(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            input_norm=_norm(of_residual),
            query_key_value=Linears((attention.q_proj, attention.k_proj, attention.v_proj)),
            query_norm=_norm(attention.q_norm),
            key_norm=_norm(attention.k_norm),
            rope=0,
            scaling=config.head_dim**-0.5,
            features={},
            attention_output=Linears((attention.o_proj,)),
            attention_norm=None,
            mlp_norm=_norm(self.post_attention_layernorm),
            gate_and_up=Linears((mlp.gate_proj, mlp.up_proj)),
            activation=config.hidden_act,
            down=Linears((mlp.down_proj,)),
            down_norm=None,
            entering_norm=None if of_embedding is None else _norm(of_embedding),
        )

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        rows: Rows,
    ) -> torch.Tensor:
        of_embedding, of_residual = self._norms()
        residual = self.residual(hidden)
        entering = of_residual(residual)
        if of_embedding is not None:
            entering = torch.cat([of_embedding(embedded), entering], dim=-1)
        if rows is not None:
            residual = residual.index_select(0, rows)
        hidden = residual + self.self_attn(entering, rotation, attend, rows)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def _norm(module: nn.Module) -> Norm | None:
    if isinstance(module, nn.Identity):
        return None
    return Norm(module.weight.detach(), module.variance_epsilon, rounds_first=True)


class Head(nn.Module):
    """An EAGLE draft head. `embed_tokens` or `lm_head` is None if the head uses the target's embedding or LM head."""

    def __init__(self, head: HeadConfig) -> None:
        super().__init__()
        size, eps = head.layer.hidden_size, head.layer.rms_norm_eps
        self._is_eagle3, self._norm_output = head.is_eagle3, head.norm_output
        own_embedding, own_output = head.has("embed_tokens.weight"), head.has("lm_head.weight")
        self.embed_tokens = nn.Embedding(head.vocab_size, size) if own_embedding else None
        self.lm_head = nn.Linear(size, head.draft_vocab_size, bias=False) if own_output else None
        in_size = head.feature_size if head.is_eagle3 else 2 * size
        self.fc = nn.Linear(in_size, size, bias=head.has("fc.bias"))
        # Variants: norms of EAGLE-3's hidden states one by one or concatenated; norms of EAGLE's two inputs.
        self.fc_norm = nn.ModuleList(
            LlamaRMSNorm(head.target_hidden_size, eps)
            for i in range(len(head.aux_layer_ids))
            if head.has(f"fc_norm.{i}.weight")
        )
        self.input_norm = LlamaRMSNorm(in_size, eps) if head.has("input_norm.weight") else nn.Identity()
        has_both = head.has("embedding_layernorm.weight")
        self.embedding_layernorm = LlamaRMSNorm(size, eps) if has_both else nn.Identity()
        self.hidden_states_layernorm = LlamaRMSNorm(head.target_hidden_size, eps) if has_both else nn.Identity()
        self.layers = nn.ModuleList(Layer(head, i) for i in range(head.num_layers))
        self._takes_both, self._residual = self.layers[0].takes_both, self.layers[0].residual
        self.stack = DecoderStack(lambda: [layer.described() for layer in self.layers])
        self.norm = LlamaRMSNorm(size, eps) if head.is_eagle3 else nn.Identity()
        self.rotary = LlamaRotaryEmbedding(head.layer)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Project the target's hidden states, concatenated, [n, feature_size], to the head's hidden size. A head of
        EAGLE-1 or -2 uses them unchanged."""
        if not self._is_eagle3:
            return features
        if self.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(self.input_norm(features))

    def rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Cosines and sines of the rotary embedding, [n, head_dim] each. positions: int64 [n]."""
        like = torch.empty(0, dtype=dtype, device=positions.device)
        cosines, sines = self.rotary(like, positions.unsqueeze(0))
        return cosines[0], sines[0]

    def forward(
        self,
        embedded: torch.Tensor,
        feature: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        rows: Rows = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over a flat batch of tokens.

        embedded: [n, hidden], for each token the embedding of the next token.
        feature: [n, hidden]. For a token of the request, this is the result of `fuse`. For a draft token, it is the
            second result of this method for the token's parent in the draft.
        rotation: the result of the method `rotation` for the tokens' positions or, with `positions`, for all.
        attend: a function that stores keys and values in the KV cache and computes attention.
        rows: int64, indices of the tokens whose outputs are returned; None for all tokens. For the other tokens, the
            last layer computes only keys and values.
        positions: int64 [n], each token's row of `rotation`; None: token i has row i.

        Returns two tensors, [len(rows), hidden] each: the input of the LM head, and `feature` for the next level of the
        draft.
        """
        if self._is_eagle3:
            hidden = feature
        else:
            both = self.embedding_layernorm(embedded), self.hidden_states_layernorm(feature)
            hidden = self.fc(torch.cat(both, dim=-1))
        if self.stack.is_fused:
            entering = embedded if self._takes_both else None
            hidden = self.stack(self._residual(hidden), rotation, positions, entering, rows)
        else:
            if positions is not None:
                rotation = rotation[0].index_select(0, positions), rotation[1].index_select(0, positions)
            for i, layer in enumerate(self.layers):
                hidden = layer(embedded, hidden, rotation, attend, rows if i + 1 == len(self.layers) else None)
        normed = self.norm(hidden)
        return normed, normed if self._norm_output else hidden
