"""The attention of every model that the engine runs, target or draft: one path over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, frozen
from torch import nn
from transformers.modeling_utils import AttentionInterface

from specdec_core.contracts.kv import KVManager, KVMetadata, Visibility
from specdec_core.contracts.proposer import RequestView
from specdec_core.errors import CompatibilityError, SpecdecError
from specdec_core.models.families import ATTENTION_KEYWORDS, HARMLESS_TENSORS
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.padding import Padding, padded_to, round_up

IMPLEMENTATION = "specdec"
"""The name under which transformers' models find `attention`: pass it as `attn_implementation`."""

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
    """The attention function that transformers' modules call. query: [1, num_heads, num_tokens, key_dim]; key, value:
    [1, num_kv_heads, num_tokens, ...]; rotated already.

    features: further keyword arguments of the family. Those in `families.ATTENTION_KEYWORDS` are used; all others were
        checked when the model was loaded.

    Returns [1, num_tokens, num_heads, value_dim]. The attention mask and the cache slots come from the module's
    `CacheSite`, not from `attention_mask`, because some families pass no keyword arguments through.
    """
    site = getattr(module, _SITE, None)
    if site is None:
        raise CompatibilityError(
            f"{type(module).__name__} was not prepared for the paged cache: load the model through specdec's Target"
        )
    tokens_first = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    attended = site.attend(module, *tokens_first, scaling, features)
    return attended.contiguous().unsqueeze(0), None  # some families call view on it


AttentionInterface.register(IMPLEMENTATION, attention)


class PagedAttention:
    """Implements `LayerAttention` for one model, target or draft.

    places: for each layer, its KV group and its index there. A draft's layers are all in one group.
    """

    implementation = IMPLEMENTATION

    def __init__(
        self, kv: KVManager, places: Sequence[tuple[int, int]], ops: Mapping[str, Callable[..., Any]], padding: Padding
    ) -> None:
        self._kv, self._places, self._ops, self._padding = kv, tuple(places), ops, padding
        self._plan: AttentionPlan | None = None  # of the current forward pass
        self._rows: tuple[torch.Tensor, AttentionPlan] | None = None  # the last rows asked for, and their plan
        self._slot_mapping: torch.Tensor | None = None
        self._window: int | None = None

    def of_group(self, group: int, num_layers: int, ops: Mapping[str, Callable[..., Any]]) -> PagedAttention:
        """The attention of another model, whose layers are a KV group of their own."""
        return PagedAttention(self._kv, [(group, layer) for layer in range(num_layers)], ops, self._padding)

    def padded(self, num_tokens: int) -> int:
        """The length to pad a flat batch of num_tokens to. In padded batches each row is computed the same way in any
        batch."""
        return round_up(num_tokens, self._padding.rows)

    def bind(self, modules: Sequence[nn.Module]) -> None:
        """Connect transformers' attention modules, in layer order, to their layers in the cache."""
        for layer, module in enumerate(modules):
            setattr(module, _SITE, CacheSite(self, layer))

    def fill(self, requests: Sequence[RequestView], num_tokens: Sequence[int]) -> None:
        (group,) = {group for group, _ in self._places}
        self._kv.fill(group, [request.id for request in requests], num_tokens)

    def metadata(
        self, requests: Sequence[RequestView], starts: Sequence[int] | torch.Tensor, lengths: Sequence[int]
    ) -> KVMetadata:
        """See `LayerAttention.metadata`."""
        if isinstance(starts, torch.Tensor):
            starts = starts.tolist()  # a KV manager counts on the host: on a GPU, this waits for the device
        return self._kv.metadata([request.id for request in requests], starts, lengths)

    @contextmanager
    def forwarding(self, metadata: KVMetadata, visibility: Visibility, *, window: int | None = None) -> Iterator[None]:
        """See `LayerAttention.forwarding`."""
        self._plan = AttentionPlan(metadata, visibility, self._padding)
        self._slot_mapping = padded_to(len(visibility.positions), metadata.slot_mapping, value=-1)
        self._window = window
        try:
            yield
        finally:
            self._plan = self._slot_mapping = self._rows = self._window = None

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `LayerAttention.store`."""
        self._store(layer, key, value)

    def _store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values of a layer, and return the layer's cache."""
        if self._slot_mapping is None:
            raise SpecdecError("attention was called outside of `with attention.forwarding(...)`: run layers inside it")
        keys, values = self._kv.cache(*self._places[layer])
        self._ops["store_kv"](keys, values, self._slot_mapping, key, value)
        return keys, values

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None = None,
        *,
        rows: torch.Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `LayerAttention.attend`."""
        keys, values = self._store(layer, key, value)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        plan = self._plan
        if rows is not None:
            if self._rows is None or self._rows[0] is not rows:  # made once for all layers that ask for the same rows
                assert self._plan is not None
                self._rows = rows, self._plan.of_rows(rows)
            query, plan = query.index_select(0, rows), self._rows[1]
        if self._window is not None:
            window = self._window if window is None else min(window, self._window)
        attended: torch.Tensor = self._ops["paged_attention"](
            query, keys, values, plan, scaling, window=window, softcap=softcap, sinks=sinks
        )
        return attended


@frozen(eq=False)
class CacheSite:
    """Connects an attention module to its layer of a KV group."""

    attention: PagedAttention
    layer: int

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        features: Mapping[str, Any],
    ) -> torch.Tensor:
        given = {argument: features.get(keyword) for keyword, argument in ATTENTION_KEYWORDS.items()}
        return self.attention.attend(self.layer, query, key, value, scaling, **given)


@define(eq=False)
class ProbeSite:
    """Stands in for the cache in every attention module during the trial forward pass at load, and records the
    calls."""

    modules: list[nn.Module]
    shapes: list[tuple[int, int, int]]  # num_kv_heads, key_dim, value_dim

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
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
    """Run two tokens through the model. Returns the modules that called `attention`, in order, with their shapes."""
    site = ProbeSite([], [])
    candidates = [module for module in model.modules() if hasattr(module, "layer_idx")]
    for module in candidates:
        setattr(module, _SITE, site)
    positions = torch.arange(2, device=next(model.parameters()).device).unsqueeze(0)
    model(torch.zeros_like(positions), position_ids=positions, use_cache=False)
    for module in candidates:
        delattr(module, _SITE)
    if len(set(site.modules)) < len(site.modules):
        raise CompatibilityError(
            f"{type(model).__name__} calls a layer's attention several times in one forward pass, as recurrent and "
            f"differential families do: only one cache per layer is supported. Use a model of another family"
        )
    return site
