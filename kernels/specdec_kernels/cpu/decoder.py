"""`fuse_layers`: runs decoder layers in one call of compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from specdec_core.ops.attention_plan import SHORT, AttentionPlan
from specdec_core.ops.decoder import DecoderLayer, Norm
from specdec_kernels.cpu.attention import paged_attention, paths_of
from specdec_kernels.cpu.bits import LIKE
from specdec_kernels.cpu.layers import (
    AFTER_ATTENTION,
    ATTENTION,
    BEFORE_ATTENTION,
    END,
    GELU_TANH,
    LAYER,
    SILU,
    run_stages,
)
from specdec_kernels.cpu.linear import PackedProduct
from specdec_kernels.cpu.threads import in_parallel
from specdec_kernels.cpu.tiles import LANES

Cache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer."""

ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}
PRODUCTS = ("query_key_value", "attention_output", "gate_and_up", "down")
NORMS = ("input_norm", "query_norm", "key_norm", "attention_norm", "mlp_norm", "down_norm")


def fuse_layers(layers: Sequence[DecoderLayer]) -> Callable[..., torch.Tensor] | None:
    """The compiled form of `specdec_core.ops.decoder.fuse_layers`. None if not all products are this package's, or if
    sizes are no whole vectors."""
    is_normed = all(layer.input_norm is not None for layer in layers[1:])
    return FusedLayers(layers) if is_normed and all(map(_is_supported, layers)) else None


def _is_supported(layer: DecoderLayer) -> bool:
    products = [getattr(layer, name) for name in PRODUCTS]
    if not all(isinstance(product, PackedProduct) for product in products):
        return False
    num_heads = layer.num_heads + 2 * layer.num_kv_heads
    width, inner = products[1].num_out, products[3].num_in
    first = products[0].num_in if layer.input_norm is None else width
    sizes = [(num_heads * layer.head_dim, first), (width, layer.num_heads * layer.head_dim), (2 * inner, width)]
    is_fitting = [(product.num_out, product.num_in) for product in products] == [*sizes, (width, inner)]
    return is_fitting and layer.head_dim % 2 == 0 and inner % LANES == 0 and layer.activation in ACTIVATIONS


class FusedLayers:
    """Runs decoder layers: see `specdec_core.ops.decoder.fuse_layers`."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self._layers = tuple(layers)
        self._kept: list[Any] = []  # whose addresses are in the table
        self._table = np.zeros(len(layers), dtype=LAYER)
        for row, layer in zip(self._table, layers, strict=True):
            self._fill(row, layer)
        self._windows = self._table["window"].copy()
        products: Any = [[getattr(layer, name) for name in PRODUCTS] for layer in layers]
        width = products[0][1].num_out
        columns = max(heads.num_out for heads, *_ in products), max(output.num_in for _, output, *_ in products)
        self._sizes = [width, *columns, max(down.num_in for *_, down in products), width]  # of a row of each buffer

    def _fill(self, row: Any, layer: DecoderLayer) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "rope", "scaling"):
            row[name] = getattr(layer, name)
        row["activation"] = ACTIVATIONS[layer.activation]
        row["window"] = layer.features.get("window") or 0
        row["softcap"] = layer.features.get("softcap") or 0.0
        sinks = layer.features.get("sinks")
        if sinks is not None:
            row["sinks"], row["num_sinks"] = self._address(sinks.float().contiguous()), len(sinks)
        for name in PRODUCTS:
            product = getattr(layer, name)
            strips, biases = torch.from_numpy(product.strips), torch.from_numpy(product.biases)
            row[name] = (
                self._address(strips),
                *strips.shape[:2],
                self._address(biases),
                product.num_in,
                product.num_out,
            )
        for name in NORMS:
            norm: Norm | None = getattr(layer, name)
            if norm is not None:
                weight = norm.weight.float().contiguous()
                row[name] = (self._address(weight), len(weight), norm.eps, norm.rounds_first)

    def _address(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def __call__(
        self,
        hidden: torch.Tensor,
        ropes: Sequence[tuple[torch.Tensor, torch.Tensor]],
        caches: Sequence[Cache],
        slot_mapping: torch.Tensor,
        plan: AttentionPlan,
        window: int | None,
        entering: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_tokens, like = sum(plan.metadata.lengths), LIKE[hidden.dtype]
        hidden, slots = hidden.clone(), slot_mapping.contiguous()
        self._place(caches, slots[:num_tokens], hidden.dtype)
        self._table["window"] = self._windows
        if window is not None:
            self._table["window"] = np.where(self._windows, np.minimum(self._windows, window), window)
        buffers = [hidden.new_empty(len(hidden) * size) for size in self._sizes]
        entering = hidden if entering is None else entering.contiguous()
        num_in = self._table[0]["query_key_value"]["num_in"]
        is_own = entering.dtype == hidden.dtype and entering.shape == (len(hidden), num_in)
        if self._layers[0].input_norm is None and not is_own:
            raise ValueError(
                f"the first layer has no norm, and entering is {entering.dtype} {list(entering.shape)}: give the input "
                f"of query, key and value, {hidden.dtype} [{len(hidden)}, {num_in}]"
            )
        addresses = tuple(buffer.data_ptr() for buffer in [hidden, *buffers, entering])
        tokens = num_tokens, self._sizes[0], slots.data_ptr()
        ropes_at = np.array([[each.data_ptr() for each in angles] for angles in ropes])
        paths = paths_of(plan)

        def run(layers: slice, *stages: int) -> None:
            args = torch.get_num_threads(), like, self._table[layers], stages, addresses, tokens, ropes_at
            in_parallel(run_stages, *args, (paths.chunks, paths.paths, paths.places))

        if max(plan.metadata.lengths, default=0) <= SHORT:
            run(slice(None), BEFORE_ATTENTION, END)
            return hidden
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            run(slice(index, index + 1), BEFORE_ATTENTION, ATTENTION)
            self._attend(index, layer, cache, plan, buffers)
            run(slice(index, index + 1), AFTER_ATTENTION, END)
        return hidden

    def _place(self, caches: Sequence[Cache], slots: torch.Tensor, dtype: torch.dtype) -> None:
        """Write the addresses of the caches to the table. Raises ValueError if compiled code would write elsewhere."""
        lowest, highest = (int(slots.min()), int(slots.max())) if len(slots) else (0, 0)
        for row, layer, cache in zip(self._table, self._layers, caches, strict=True):
            for tensor in cache:
                is_row = tensor.dim() == 3 and tensor.stride()[1:] == (layer.head_dim, 1) and tensor.dtype == dtype
                if not is_row or tensor.shape[1:] != (layer.num_kv_heads, layer.head_dim):
                    raise ValueError(
                        f"a KV cache is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}: give "
                        f"{dtype} [num_slots, {layer.num_kv_heads}, {layer.head_dim}] with contiguous rows"
                    )
                if not -len(tensor) <= lowest <= highest < len(tensor):
                    raise ValueError(f"slots from {lowest} to {highest} in a KV cache of {len(tensor)}: give its own")
            keys, values = cache
            row["num_slots"] = len(keys)
            row["keys"], row["key_stride"] = keys.data_ptr(), keys.stride(0)
            row["values"], row["value_stride"] = values.data_ptr(), values.stride(0)

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        cache: Cache,
        plan: AttentionPlan,
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """Compute attention by the operation, which leaves long prompts to torch."""
        row, num_tokens = self._table[index], len(buffers[0]) // self._sizes[0]  # padding included
        width, num_columns = int(row["query_key_value"]["num_out"]), layer.num_heads * layer.head_dim
        heads = buffers[1][: num_tokens * width].view(num_tokens, width)
        query = heads[:, :num_columns].unflatten(1, (layer.num_heads, layer.head_dim))
        given = {**layer.features, "window": int(row["window"]) or None}
        attended = paged_attention(query, *cache, plan, layer.scaling, **given)
        buffers[2][: attended.numel()].copy_(attended.flatten())
