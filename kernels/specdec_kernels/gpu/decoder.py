"""`fuse_layers`: runs decoder layers with few kernels, and without the model's own modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.decoder import NORMS, PRODUCTS, Angles, Cache, DecoderLayer, Norm
from specdec_kernels.gpu.attention import paged_attention
from specdec_kernels.gpu.gate import ACTIVATIONS, gated
from specdec_kernels.gpu.heads import place_heads
from specdec_kernels.gpu.linear import Product
from specdec_kernels.gpu.norm import MOST_COLUMNS, add_and_norm
from specdec_kernels.layer_inputs import (
    check_cache,
    check_copies,
    check_positions,
    check_tables,
    check_tokens,
    has_known_sizes,
    num_entering,
)


def fuse_layers(layers: Sequence[DecoderLayer]) -> Callable[..., torch.Tensor] | None:
    """As `specdec_core.ops.decoder.fuse_layers`. None if not all products are this package's, if sizes or the
    activation are not known, or if a layer after the first takes other rows beside its input."""
    is_fitting = all(map(_is_supported, layers)) and not any(map(num_entering, layers[1:]))
    return FusedLayers(layers) if is_fitting else None


def _is_supported(layer: DecoderLayer) -> bool:
    if not all(isinstance(getattr(layer, name), Product) for name in PRODUCTS) or not has_known_sizes(layer):
        return False
    norms: list[Norm | None] = [getattr(layer, name) for name in NORMS]
    is_narrow = all(norm is None or len(norm.weight) <= MOST_COLUMNS for norm in norms)
    return is_narrow and layer.activation in ACTIVATIONS


class FusedLayers:
    """Runs decoder layers: see `specdec_core.ops.decoder.fuse_layers`."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self._layers = tuple(layers)
        self._widths = {layer.rope: layer.head_dim for layer in layers}

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
        angles, positions = self._angles(ropes, positions, hidden)
        check_tokens(hidden, entering, slot_mapping, num_entering(self._layers[0]))
        inputs: dict[int, torch.Tensor] = {}
        if copied:
            check_copies(copied, copies, hidden)
            assert copies is not None
            inputs = dict(zip(copied, copies, strict=True))
        total, added, norm_of_added = hidden.contiguous(), None, None  # the layer's input is the sum of both
        slots = slot_mapping.contiguous()
        for i, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            check_cache(layer, cache, hidden.dtype)
            total, given = add_and_norm(total, added, norm_of_added, layer.input_norm, inputs.get(i) if i else None)
            if entering is not None and i == 0:
                ahead = add_and_norm(entering.contiguous(), None, None, layer.entering_norm)[1]
                given = torch.cat([ahead, given], dim=-1)
            heads = layer.query_key_value(given)
            query = place_heads(heads, layer, angles[layer.rope], positions, cache, slots)
            if rows is not None and plan_of_rows is not None and i == len(self._layers) - 1:
                query, total, plan = query.index_select(0, rows), total.index_select(0, rows), plan_of_rows
            attended = layer.attention_output(_attended(query, cache, plan, layer, window))
            total, given = add_and_norm(total, attended, layer.attention_norm, layer.mlp_norm)
            added = layer.down(gated(layer.gate_and_up(given), layer.activation))
            norm_of_added = layer.down_norm
        if 0 in inputs:
            inputs[0].copy_(hidden)
        return add_and_norm(total, added, norm_of_added, None)[0]

    def _angles(
        self, ropes: Sequence[Angles], positions: torch.Tensor | None, hidden: torch.Tensor
    ) -> tuple[dict[int, Angles], torch.Tensor | None]:
        """Check the tables that the layers use, and the tokens' rows in them."""
        check_tables(ropes, self._widths, hidden.dtype)
        angles = {rope: _with_whole_rows(ropes[rope]) for rope in self._widths}
        check_positions(positions, len(hidden), min(len(cos) for cos, _ in angles.values()))
        return angles, None if positions is None else positions.contiguous()


def _with_whole_rows(angles: Angles) -> Angles:
    cos, sin = (table if table.stride(1) == 1 else table.contiguous() for table in angles)
    return cos, sin


def _attended(
    query: torch.Tensor, cache: Cache, plan: AttentionPlan, layer: DecoderLayer, window: int | None
) -> torch.Tensor:
    own = layer.features.get("window")
    windows = [each for each in (own, window) if each is not None]
    features = {**layer.features, "window": min(windows, default=None)}
    return paged_attention(query, *cache, plan, layer.scaling, **features).flatten(1)
