"""The one attention path: every model that the engine runs, target or draft, computes its attention here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, frozen
from torch import nn
from transformers.modeling_utils import AttentionInterface

from specdec_core.errors import CompatibilityError
from specdec_core.kv_manager import KVManager
from specdec_core.ops.attention_plan import AttentionPlan

IMPLEMENTATION = "specdec"
"""The name under which transformers' models find `attention`: pass it as `attn_implementation`."""

HARMLESS_TENSORS = frozenset({"s_aux", "position_ids", "cache_position"})
"""Keyword arguments with tensors that the attention function takes into account, or need not."""

_SITE = "specdec_site"


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, num_heads, num_tokens, key_dim], key and value [1, num_kv_heads, num_tokens, ...], rotated already.

    features: what a family passes besides. sliding_window (int), softcap (float) and s_aux (sinks) count; the others
    were looked at when the model was loaded. Returns [1, num_tokens, num_heads, value_dim]. What to see and where to
    store comes from the module's site, not from `attention_mask`: some families pass no keyword arguments through.
    """
    site = getattr(module, _SITE, None)
    if site is None:
        raise CompatibilityError(
            f"{type(module).__name__} was not prepared for the paged cache: load the model through specdec's Target"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    tokens_first = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return site.attend(module, *tokens_first, scaling, features).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attention)


@define(eq=False)
class ForwardContext:
    """What the attention of one model needs to know of the pass under way; set by whoever runs the model."""

    kv: KVManager
    ops: Mapping[str, Callable[..., Any]]
    plan: AttentionPlan | None = None
    slot_mapping: torch.Tensor | None = None  # int64 [num_tokens]


@frozen(eq=False)
class CacheSite:
    """An attention module's place: its group and layer in the KV manager."""

    context: ForwardContext
    keys: torch.Tensor
    values: torch.Tensor

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        features: Mapping[str, Any],
    ) -> torch.Tensor:
        context = self.context
        context.ops["store_kv"](self.keys, self.values, context.slot_mapping, key, value)
        attended: torch.Tensor = context.ops["paged_attention"](
            query,
            self.keys,
            self.values,
            context.plan,
            scaling,
            window=features.get("sliding_window"),
            softcap=features.get("softcap"),
            sinks=features.get("s_aux"),
        )
        return attended


@define(eq=False)
class ProbeSite:
    """Stands in every candidate module during the one forward at load, and records who asks for what."""

    modules: list[nn.Module]
    shapes: list[tuple[int, int, int]]  # num_kv_heads, key_dim, value_dim

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        features: Mapping[str, Any],
    ) -> torch.Tensor:
        for name, given in features.items():
            if isinstance(given, torch.Tensor) and name not in HARMLESS_TENSORS:
                raise CompatibilityError(
                    f"{type(module).__name__} passes {name} to its attention, which specdec's does not take into "
                    f"account: the output would be wrong. Models with this feature are not supported"
                )
        self.modules.append(module)
        self.shapes.append((key.shape[1], key.shape[2], value.shape[2]))
        return query.new_zeros(*query.shape[:2], value.shape[2])


def probe(model: nn.Module) -> ProbeSite:
    """Run two tokens through the model and return which modules called `attention`, in order, with their shapes."""
    site = ProbeSite([], [])
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _SITE, site)
    device = next(model.parameters()).device
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    model(tokens, position_ids=torch.arange(2, device=device).unsqueeze(0), use_cache=False)
    for module in model.modules():
        if getattr(module, _SITE, None) is site:
            delattr(module, _SITE)
    return site


def bind(modules: list[nn.Module], group: int, context: ForwardContext) -> None:
    """Give each attention module, in layer order, its place in the KV group."""
    for layer, module in enumerate(modules):
        setattr(module, _SITE, CacheSite(context, *context.kv.cache(group, layer)))
