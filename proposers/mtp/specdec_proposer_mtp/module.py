"""An MTP module: a projection, and a decoder layer of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from specdec_core import DecoderLayer, DecoderStack, KVLayout, record_layer
from specdec_proposer_mtp.families import Family

NUM_TRIALS = 5


class PreNormBlock(nn.Module):
    """A decoder layer with a norm before attention and one before the MLP, put together from a family's parts."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()

    def forward(self, hidden: torch.Tensor, **others: Any) -> torch.Tensor:
        hidden = hidden + self.self_attn(hidden_states=self.input_layernorm(hidden), **others)[0]
        mixed: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


class MTPModule(nn.Module):
    """An MTP module in the family's architecture (DeepSeek-AI 2024, section 2.2).

    config: transformers' configuration of the module's decoder layer.
    """

    def __init__(self, family: Family, config: Any) -> None:
        super().__init__()
        self._family, self.config, size = family, config, config.hidden_size

        def part(name: str, *args: Any, **kwargs: Any) -> Any:
            return family.of_transformers("modeling", name)(*args, **kwargs)

        def norm() -> nn.Module:
            made: nn.Module = part("RMSNorm", size, eps=config.rms_norm_eps)
            return made

        self.embed = nn.Embedding(config.vocab_size, size) if "embed" in family.names else None
        self.enorm, self.hnorm, self.proj = norm(), norm(), nn.Linear(2 * size, size, bias=False)
        if family.has_layer:
            self.block = part("DecoderLayer", config, 0)
        else:
            self.block = PreNormBlock(part("MLA", config, layer_idx=0), part("MLP", config), norm)
        self.stack = DecoderStack(self._described)
        self.norm, self.rotary = norm(), part("RotaryEmbedding", config)
        for each in self.block.modules():
            if hasattr(each, "gate_up_proj") and each.gate_up_proj.ndim == 3:
                name_each_expert(each)

    @property
    def attention(self) -> nn.Module:
        """The module that calls attention."""
        found: nn.Module = self.block.self_attn
        return found

    def forward(
        self, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the decoder layer's outputs, [m, hidden].

        embedded, features: [n, hidden], for each slot the embedding of the next token, and the feature of the slot's
            own token. positions: int64 [n], of the slot's own token.
        rows: int64 [m], the slots whose outputs are wanted; None: all.
        """
        if self._family.zero_first:
            embedded = embedded.masked_fill((positions == 0).unsqueeze(1), 0)
        both = [self.enorm(embedded), self.hnorm(features)]
        hidden = self.proj(torch.cat(both[::-1] if self._family.hidden_first else both, dim=-1)).unsqueeze(0)
        places = positions.unsqueeze(0)
        angles = self.rotary(hidden, places)
        if self.stack.is_fused:
            return self.stack(hidden[0], (angles[0][0], angles[1][0]), rows=rows)
        output = self.block(hidden, position_embeddings=angles, position_ids=places, attention_mask=None)
        outputs: torch.Tensor = (output[0] if isinstance(output, tuple) else output)[0]
        return outputs if rows is None else outputs.index_select(0, rows)

    def _described(self) -> list[DecoderLayer]:
        """The decoder layer as data, for `DecoderStack`; [] for a mixture of experts or multi-head latent attention."""
        weight = self.proj.weight
        embedded, features = torch.randn(2, NUM_TRIALS, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(
            weight
        )
        positions = torch.arange(1, NUM_TRIALS + 1, device=weight.device)
        layer = record_layer(self, self.block, self.attention, lambda: self(embedded, features, positions))
        return [] if layer is None else [layer]

    def drafting(
        self, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute inputs of the LM head, and features for the next draft token, [m, hidden] each.

        The arguments are those of `forward`.
        """
        hidden = self(embedded, features, positions, rows)
        normed = self.norm(hidden)
        return normed, normed if self._family.recurs_normed else hidden


def name_each_expert(experts: nn.Module) -> None:
    """Let a module that holds the weights of all experts together, [experts, ...], save and load them under the names
    of checkpoints, such as `0.gate_proj.weight`."""

    def split(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: Any) -> None:
        for i, both in enumerate(state.pop(f"{prefix}gate_up_proj")):
            state[f"{prefix}{i}.gate_proj.weight"], state[f"{prefix}{i}.up_proj.weight"] = both.chunk(2)
        for i, down in enumerate(state.pop(f"{prefix}down_proj")):
            state[f"{prefix}{i}.down_proj.weight"] = down

    def join(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *others: Any) -> None:
        gate, up, down = (
            torch.stack([state.pop(f"{prefix}{i}.{kind}_proj.weight") for i in range(len(experts.down_proj))])
            for kind in ("gate", "up", "down")
        )
        state[f"{prefix}gate_up_proj"], state[f"{prefix}down_proj"] = torch.cat([gate, up], dim=1), down

    experts.register_state_dict_post_hook(split)
    experts.register_load_state_dict_pre_hook(join)


def kv_layout(config: Any, dtype: torch.dtype) -> KVLayout:
    """The KV cache of one decoder layer with this configuration: multi-head latent attention, as in DeepSeek-V3, stores
    the keys and values of all heads."""
    if getattr(config, "kv_lora_rank", None):
        key_size = config.qk_nope_head_dim + config.qk_rope_head_dim
        return KVLayout(1, config.num_attention_heads, key_size, config.v_head_dim, dtype)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVLayout(1, config.num_key_value_heads, size, size, dtype)
