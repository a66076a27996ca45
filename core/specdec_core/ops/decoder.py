"""Decoder layers of the common kind, as data that a plugin can compile into one operation, and the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import nn
from torch.nn.functional import gelu, silu

from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.elementwise import rms_norm, rotary

PRODUCTS = ("query_key_value", "attention_output", "gate_and_up", "down")
NORMS = ("entering_norm", "input_norm", "query_norm", "key_norm", "attention_norm", "mlp_norm", "down_norm")
"""Names of the linear layers and of the norms of a `DecoderLayer`."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of a rotary embedding."""
Cache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer."""
Product = Callable[[torch.Tensor], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda rows: gelu(rows, approximate="tanh"),
}


@frozen(eq=False)
class Norm:
    """A root mean square norm (Zhang and Sennrich 2019).

    weight: float32 [width], or the model's dtype if `rounds_first`.
    rounds_first: the normalized row is rounded to the model's dtype before the weight is applied, as in Llama; else
        after it, as in Gemma.
    """

    weight: torch.Tensor
    eps: float
    rounds_first: bool

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self.rounds_first:
            return rms_norm(rows, self.weight, self.eps)
        wide = rows.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(rows.dtype)


@frozen(eq=False)
class Linears:
    """Linear layers with the same input. Called with it, returns their outputs side by side."""

    layers: tuple[nn.Linear, ...]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(rows) for layer in self.layers], dim=-1)


@frozen(eq=False)
class DecoderLayer:
    """A decoder layer with norms before attention and MLP, a gated MLP, and two residual connections.

    In this order: `input_norm`; `query_key_value` [..., (num_heads + 2 * num_kv_heads) * head_dim], in this order of
    columns; `query_norm` and `key_norm` on each head; rotary embedding; attention; `attention_output`;
    `attention_norm`; plus the layer's input. Then `mlp_norm`; `gate_and_up` [..., 2 * intermediate]; activation of the
    first half, times the second; `down`; `down_norm`; plus the MLP's input. Norms that are None are left out.

    Each result is rounded to the model's dtype. In a draft head, the input of `query_key_value` may be wider than the
    layer's, as in EAGLE-3: then it begins with other rows, to which `entering_norm` is applied.

    rope: index of the layer's rotary embedding: families may have one for each type of layer.
    scaling, features: as for `paged_attention`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    input_norm: Norm | None
    query_key_value: Product
    query_norm: Norm | None
    key_norm: Norm | None
    rope: int
    scaling: float
    features: Mapping[str, Any]
    attention_output: Product
    attention_norm: Norm | None
    mlp_norm: Norm
    gate_and_up: Product
    activation: str  # a key of ACTIVATIONS
    down: Product
    down_norm: Norm | None
    entering_norm: Norm | None = None

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        entering: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer on hidden states [1, num_tokens, width]. This is the reference.

        cos, sin: [1, num_tokens, head_dim].
        attend: gets query, key and value [1, heads, num_tokens, head_dim], returns [1, num_tokens, num_heads *
            head_dim].
        entering: [1, num_tokens, any width], what the input of `query_key_value` begins with; None: nothing.
        """
        given = hidden if self.input_norm is None else self.input_norm(hidden)
        if entering is not None:
            ahead = entering if self.entering_norm is None else self.entering_norm(entering)
            given = torch.cat([ahead, given], dim=-1)
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        heads = self.query_key_value(given)
        heads = heads.view(*heads.shape[:-1], sum(sizes), self.head_dim)
        query, key, value = torch.split(heads, sizes, dim=-2)
        query = query if self.query_norm is None else self.query_norm(query)
        key = key if self.key_norm is None else self.key_norm(key)
        query, key = rotary(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        attended = self.attention_output(attend(query, key, value.transpose(1, 2)))
        hidden = hidden + (attended if self.attention_norm is None else self.attention_norm(attended))
        gate, up = self.gate_and_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        output = self.down(ACTIVATIONS[self.activation](gate) * up)
        return hidden + (output if self.down_norm is None else self.down_norm(output))


class Run(Protocol):
    """Runs fused layers: what a plugin's `fuse_layers` returns."""

    def __call__(
        self,
        hidden: torch.Tensor,
        ropes: Sequence[Angles],
        positions: torch.Tensor | None,
        caches: Sequence[Cache],
        slot_mapping: torch.Tensor,
        plan: AttentionPlan,
        window: int | None,
        entering: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        plan_of_rows: AttentionPlan | None = None,
        copied: Sequence[int] = (),
        copies: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run all layers on a flat batch of tokens. Returns [num_tokens or n, width]. A token's result must not depend
        on tokens that it does not attend to, or on their number: the batch is not padded.

        hidden: [num_tokens, width].
        ropes: (cos, sin) of each rotary embedding, [num_positions, head_dim].
        positions: int64 [num_tokens], the row of each token in these tables; for others, the nearest row. None: token
            i has row i.
        caches: (keys, values) of each layer, as for `store_kv`.
        slot_mapping, plan: as for `store_kv` and `paged_attention`.
        window: sliding window of all layers, in tokens. A layer whose own window is smaller keeps its own.
        entering: [num_tokens, any width], what the first layer's input of `query_key_value` begins with; None:
            nothing.
        rows: int64 [n], the tokens whose outputs are wanted; None: all.
        plan_of_rows: the plan of these tokens alone; None: all.
        copied: indices of layers whose inputs are written to `copies`, contiguous [len(copied), num_tokens, width].
        """
        ...


def fuse_layers(layers: Sequence[DecoderLayer]) -> Run | None:
    """Return None, since the reference has nothing faster than the model's own modules. A plugin's `fuse_layers`
    returns None for layers that it does not support. The products of the layers are those that `pack_linear`
    returned."""
    return None
