"""Random weights of tiny draft heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor


@frozen
class Target:
    """The target for which a tiny head is made: its sizes, and the scale of its embeddings and hidden states."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    embedding_rms: float = 1.0  # root mean square of an embedding's entries
    feature_rms: float = 1.0  # root mean square of the entries of hidden states that the head reads

    @property
    def aux_layer_ids(self) -> list[int]:
        """The indices of the layers whose inputs an EAGLE-3 head reads by default."""
        num_layers = self.num_hidden_layers
        return [2, num_layers // 2, num_layers - 3]


@frozen(kw_only=True)
class Shape:
    """A head's own sizes, and the variants that it has. hidden_size and draft_vocab_size are the target's if they are
    None."""

    hidden_size: int | None = None  # other than the target's: EAGLE-3 only, and it then has embeddings of its own
    intermediate_size: int = 48
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int | None = None  # hidden_size / num_attention_heads
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3's layer
    own_embeddings: bool = False
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    dtype: torch.dtype = torch.float32


DEFAULT = Shape()


@frozen
class Draw:
    """Draws a head's random tensors. `matrix` draws matrices that map an input with unit variance to an output with
    unit variance."""

    seed: int
    shape: Shape
    target: Target
    hidden_size: int
    _generator: torch.Generator = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_generator", torch.Generator().manual_seed(self.seed))

    @property
    def draft_vocab_size(self) -> int:
        return self.shape.draft_vocab_size or self.target.vocab_size

    @property
    def head_dim(self) -> int:
        return self.shape.head_dim or self.hidden_size // self.shape.num_attention_heads

    def matrix(self, num_rows: int, num_columns: int) -> Tensor:
        return torch.randn(num_rows, num_columns, generator=self._generator) / num_columns**0.5

    def vector(self, size: int) -> Tensor:
        return 0.5 * torch.randn(size, generator=self._generator)

    def norm(self, size: int) -> Tensor:
        return 0.5 + torch.rand(size, generator=self._generator)

    def embeddings(self) -> Tensor:
        return self.target.embedding_rms * torch.randn(
            self.target.vocab_size, self.hidden_size, generator=self._generator
        )

    def vocabulary(self) -> dict[str, Tensor]:
        """Draw a draft vocabulary, a random subset of the target's tokens in ascending order, and return its tensors
        d2t and t2d."""
        token_ids = torch.randperm(self.target.vocab_size, generator=self._generator)[: self.draft_vocab_size]
        in_draft = torch.zeros(self.target.vocab_size, dtype=torch.bool)
        in_draft[token_ids] = True
        return {"d2t": token_ids.sort().values - torch.arange(self.draft_vocab_size), "t2d": in_draft}

    def layers(self, first_width: int, strength: float) -> dict[str, Tensor]:
        """Draw the tensors of all layers. Returns them by name.

        first_width: input width of the first layer.
        strength: scale of the outputs of attention and MLP relative to the residual stream.
        """
        tensors: dict[str, Tensor] = {}
        for i in range(self.shape.num_hidden_layers):
            layer = self._layer(first_width if i == 0 else self.hidden_size, strength)
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
        return tensors

    def _layer(self, input_width: int, strength: float) -> dict[str, Tensor]:
        shape, hidden_size = self.shape, self.hidden_size
        query_width, kv_width = shape.num_attention_heads * self.head_dim, shape.num_key_value_heads * self.head_dim
        tensors = {
            "input_layernorm.weight": self.norm(hidden_size),
            "post_attention_layernorm.weight": self.norm(hidden_size),
            "self_attn.q_proj.weight": 2 * self.matrix(query_width, input_width),
            "self_attn.k_proj.weight": self.matrix(kv_width, input_width),
            "self_attn.v_proj.weight": self.matrix(kv_width, input_width),
            "self_attn.o_proj.weight": strength * self.matrix(hidden_size, query_width),
            "mlp.gate_proj.weight": 2 * self.matrix(shape.intermediate_size, hidden_size),
            "mlp.up_proj.weight": self.matrix(shape.intermediate_size, hidden_size),
            "mlp.down_proj.weight": strength * self.matrix(hidden_size, shape.intermediate_size),
        }
        biased = [name for name in tensors if name.startswith("self_attn") and shape.attention_bias]
        biased += [name for name in tensors if name.startswith("mlp") and shape.mlp_bias]
        for name in biased:
            tensors[name.replace(".weight", ".bias")] = self.vector(len(tensors[name]))
        if shape.qk_norm:
            tensors |= {f"self_attn.{part}_norm.weight": 1 + self.norm(self.head_dim) for part in ("q", "k")}
        return tensors

    def config(self) -> dict[str, Any]:
        """Return the keys of a Llama config, without those of the rotary embedding."""
        shape = self.shape
        return {
            "model_type": "llama",
            "vocab_size": self.target.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_hidden_layers,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            **({"head_dim": self.head_dim} if shape.head_dim else {}),
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": shape.rms_norm_eps,
            **({"attention_bias": True} if shape.attention_bias else {}),
            **({"mlp_bias": True} if shape.mlp_bias else {}),
            "tie_word_embeddings": False,
            "torch_dtype": str(shape.dtype).removeprefix("torch."),
            "use_cache": True,
        }
