"""Attention over the paged KV cache, for the target and for draft models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import nn
from transformers.modeling_utils import AttentionInterface

from specdec_core.contracts.kv import KVManager, KVMetadata, StateTensor, Visibility
from specdec_core.contracts.proposer import RequestView
from specdec_core.errors import CompatibilityError, SpecdecError
from specdec_core.models.families import ATTENTION_KEYWORDS, HARMLESS_TENSORS
from specdec_core.models.mixers import SITE, Run, StateProbe
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.padding import Padding, padded_to, round_up

IMPLEMENTATION = "specdec"
"""The name of `attention` among transformers' attention functions: pass it as `attn_implementation`."""


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention over the paged KV cache; modules from transformers call this function.

    query: [1, num_heads, num_tokens, key_dim]; rotary embeddings have been applied to query and key.
    key, value: [1, num_kv_heads, num_tokens, ...].
    attention_mask: not used. The mask and the cache slots come from the `PagedAttention` of the module, because some
        families do not pass keyword arguments on to their attention.
    scaling: factor by which the dot products of queries and keys are multiplied. None: key_dim ** -0.5.
    features: further keyword arguments of the model's family. Those in `families.ATTENTION_KEYWORDS` are used; all
        others were checked when the model was loaded.

    Returns the result [1, num_tokens, num_heads, value_dim], and None in place of the attention weights.
    """
    site = getattr(module, SITE, None)
    if site is None:
        raise CompatibilityError(
            f"{type(module).__name__} was not prepared for the paged cache: load the model through specdec's Target"
        )
    tokens_first = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    attended = site.attend(module, *tokens_first, scaling, features)
    return attended.contiguous().unsqueeze(0), None  # some families call view on it


AttentionInterface.register(IMPLEMENTATION, attention)


class PagedAttention:
    """Attention of one model, target or draft, over the KV cache of its layers. Implements the protocol
    `LayerAttention`.

    places: for each layer that attends, the index of its KV group and the layer's index in that group. All layers of
        a draft model are in one group.
    ops: {name of an operation: operation}, with at least `paged_attention` and `store_kv`.
    kv, padding: of forward passes.
    """

    implementation = IMPLEMENTATION

    def __init__(
        self, kv: KVManager, places: Sequence[tuple[int, int]], ops: Mapping[str, Callable[..., Any]], padding: Padding
    ) -> None:
        self.kv, self.places, self._ops, self.padding = kv, tuple(places), ops, padding
        self._plan: AttentionPlan | None = None  # of the current forward pass
        self._rows: tuple[torch.Tensor, AttentionPlan] | None = None  # the last rows asked for, and their plan
        self._slot_mapping: torch.Tensor | None = None
        self._window: int | None = None
        self._host_rows: Sequence[int] | None = None

    def of_group(self, group: int, num_layers: int, ops: Mapping[str, Callable[..., Any]]) -> PagedAttention:
        """Make a `PagedAttention` for a draft model or draft head, with the same KV manager. Its forward passes are not
        padded. So drafts may round differently in another batch, which changes no token of a chosen draft's output, and
        no distribution of a sampled one's.

        group: the index of a KV group. Its layers are those of the draft model or draft head.
        ops: {name of an operation: operation}, with at least `paged_attention` and `store_kv`.
        """
        places = [(group, layer) for layer in range(num_layers)]
        return PagedAttention(self.kv, places, ops, evolve(self.padding, rows=1))

    def need_no_padded_rows(self) -> None:
        """Note that no token's result depends on the number of tokens in the batch."""
        self.padding = evolve(self.padding, rows=1)

    def padded(self, num_tokens: int) -> int:
        """Return the length to which a flat batch of num_tokens tokens is padded. With this padding, a token's result
        does not depend on the number of other tokens in the batch."""
        return round_up(num_tokens, self.padding.rows)

    def bind(self, modules: Sequence[nn.Module]) -> None:
        """Give each attention module from transformers a `CacheSite`, through which `attention` finds the KV cache of
        the module's layer. modules: one for each layer that attends, in order."""
        for layer, module in enumerate(modules):
            setattr(module, SITE, CacheSite(self, layer))

    def fill(self, requests: Sequence[RequestView], num_tokens: Sequence[int]) -> None:
        (group,) = {group for group, _ in self.places}
        self.kv.fill(group, [request.id for request in requests], num_tokens)

    def metadata(
        self, requests: Sequence[RequestView], starts: Sequence[int] | torch.Tensor, lengths: Sequence[int]
    ) -> KVMetadata:
        if isinstance(starts, torch.Tensor):
            starts = starts.tolist()  # a KV manager counts on the host: on a GPU, this waits for the device
        return self.kv.metadata([request.id for request in requests], starts, lengths)

    def run_layers(
        self,
        run: Callable[..., torch.Tensor],
        first: int,
        past: int,
        hidden: torch.Tensor,
        ropes: Sequence[tuple[torch.Tensor, torch.Tensor]],
        positions: torch.Tensor | None,
        entering: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        copied: Sequence[int] = (),
        copies: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run fused layers, first to past - 1, on the tokens of the current forward pass. run: what the operation
        `fuse_layers` returned; hidden, ropes, positions, entering, rows, copied, copies, and the result: as it has
        them."""
        caches = [self.kv.cache(*place) for place in self.places[first:past]]
        plan_of_rows = None if rows is None else self._plan_of(rows)
        cache = caches, self._slot_mapping, self._plan, self._window
        return run(hidden, ropes, positions, *cache, entering, rows, plan_of_rows, copied, copies)

    def _plan_of(self, rows: torch.Tensor) -> AttentionPlan:
        """Return the plan of some tokens alone, made once for all layers that ask for the same rows."""
        if self._rows is None or self._rows[0] is not rows:
            assert self._plan is not None
            self._rows = rows, self._plan.of_rows(rows, self._host_rows)
        return self._rows[1]

    def plan_of(self, metadata: KVMetadata, visibility: Visibility) -> AttentionPlan:
        """Make the plan of a forward pass, for `using`."""
        return AttentionPlan(metadata, visibility, self.padding)

    def forwarding(
        self,
        metadata: KVMetadata,
        visibility: Visibility,
        window: int | None = None,
        rows: Sequence[int] | None = None,
    ) -> AbstractContextManager[None]:
        return self.using(self.plan_of(metadata, visibility), window, rows)

    @contextmanager
    def using(
        self, plan: AttentionPlan, window: int | None = None, rows: Sequence[int] | None = None
    ) -> Iterator[None]:
        """A context for one forward pass, as `forwarding`, with its plan."""
        self._plan = plan
        self._slot_mapping = padded_to(len(plan.visibility.positions), plan.metadata.slot_mapping, value=-1)
        self._window, self._host_rows = window, rows
        try:
            yield
        finally:
            if self._plan is plan:  # after an interrupt this may be closed late, in the middle of another pass
                self._plan = self._slot_mapping = self._rows = self._window = self._host_rows = None

    @property
    def plan(self) -> AttentionPlan | None:
        """Of the current forward pass; None: there is none."""
        return self._plan

    @property
    def window(self) -> int | None:
        """Of the current forward pass."""
        return self._window

    @contextmanager
    def replacing(self, plan: AttentionPlan) -> Iterator[None]:
        """A context inside of a forward pass in which attention has another plan, with the same window."""
        before = self._plan, self._slot_mapping, self._rows, self._host_rows
        self._plan, self._slot_mapping, self._rows, self._host_rows = plan, plan.metadata.slot_mapping, None, None
        try:
            yield
        finally:
            if self._plan is plan:
                self._plan, self._slot_mapping, self._rows, self._host_rows = before

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._store(layer, key, value)

    def _store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a forward pass's tokens into the KV cache of a layer. Returns the layer's whole
        cache: the keys and the values of all slots."""
        if self._slot_mapping is None:
            raise SpecdecError("attention was called outside of `with attention.forwarding(...)`: run layers inside it")
        keys, values = self.kv.cache(*self.places[layer])
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
        keys, values = self._store(layer, key, value)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        plan = self._plan
        if rows is not None:
            query, plan = query.index_select(0, rows), self._plan_of(rows)
        if self._window is not None:
            window = self._window if window is None else min(window, self._window)
        attended: torch.Tensor = self._ops["paged_attention"](
            query, keys, values, plan, scaling, window=window, softcap=softcap, sinks=sinks
        )
        return attended


@frozen(eq=False)
class CacheSite:
    """Links an attention module from transformers to its layer's KV cache. It is an attribute of that module."""

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
    """Takes the place of `CacheSite` in all attention modules, and of `StateSite` in recurrent layers, while `probe`
    runs the model. For each call of attention it records the module and the shapes of its keys and values, and returns
    zeros. For each recurrent layer it records the module and its states."""

    modules: list[nn.Module] = field(factory=list)
    shapes: list[tuple[int, int, int]] = field(factory=list)  # num_kv_heads, key_dim, value_dim
    mixers: list[nn.Module] = field(factory=list)
    states: list[tuple[StateTensor, ...]] = field(factory=list)  # of each mixer
    layers: list[nn.Module] = field(factory=list)  # modules and mixers, in the order of their calls

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
        self.layers.append(module)
        self.shapes.append((key.shape[1], key.shape[2], value.shape[2]))
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def mix(self, module: nn.Module, hidden: torch.Tensor, run: Run) -> torch.Tensor:
        probed = StateProbe()
        mixed = run(hidden, probed)
        self.mixers.append(module)
        self.layers.append(module)
        self.states.append(tuple(probed.found))
        return mixed


@contextmanager
def attention_sites(modules: Sequence[nn.Module], site: Any) -> Iterator[None]:
    """A context in which attention modules use `site`, which has the method `attend` of `CacheSite`. If there are
    recurrent layers among the modules, it also has the method `mix` of `StateSite`."""
    for module in modules:
        setattr(module, SITE, site)
    try:
        yield
    finally:
        for module in modules:
            delattr(module, SITE)


def probe(model: nn.Module) -> ProbeSite:
    """Find a model's attention modules and recurrent layers by running the model on two tokens. Returns a `ProbeSite`
    with the modules that called `attention`, in the order of the calls, and the shapes of their keys and values.

    Raises CompatibilityError if a module called `attention` more than once, or gave it tensors that specdec's attention
    does not use.
    """
    site = ProbeSite()
    positions = torch.arange(2, device=next(model.parameters()).device).unsqueeze(0)
    with attention_sites([module for module in model.modules() if hasattr(module, "layer_idx")], site):
        model(torch.zeros_like(positions), position_ids=positions, use_cache=False)
    if len(set(site.layers)) < len(site.layers):
        raise CompatibilityError(
            f"{type(model).__name__} calls a layer's attention several times in one forward pass, as recurrent and "
            f"differential families do: only one cache per layer is supported. Use a model of another family"
        )
    return site
