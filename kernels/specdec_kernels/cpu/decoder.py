"""`fuse_layers`: runs decoder layers in one call of compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import is_not
from typing import Any

import numpy as np
import torch
from attrs import frozen

from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.decoder import NORMS, PRODUCTS, Angles, Cache, DecoderLayer, Norm
from specdec_kernels.cpu import amx
from specdec_kernels.cpu.activations import ACTIVATIONS
from specdec_kernels.cpu.attention import paths_of
from specdec_kernels.cpu.bits import LIKE
from specdec_kernels.cpu.lanes import LANES
from specdec_kernels.cpu.layers import (
    ATTENTION,
    END,
    LAYER,
    NORM_INPUT,
    addresses_of,
    run_stages,
)
from specdec_kernels.cpu.linear import PackedProduct
from specdec_kernels.cpu.rope_tables import Placed, Ropes
from specdec_kernels.cpu.threads import in_parallel
from specdec_kernels.layer_inputs import check_cache, check_copies, check_tokens, has_known_sizes, num_entering

HEADS = 1
"""Index of `_Tokens.starts`."""
NO_COPIES = 0, 0
"""No layer's input is copied."""


def fuse_layers(layers: Sequence[DecoderLayer]) -> Callable[..., torch.Tensor] | None:
    """The compiled form of `specdec_core.ops.decoder.fuse_layers`. None if not all products are this package's, if
    sizes are odd or no whole vectors, if the activation is not known, or if a layer after the first takes other rows
    beside its input."""
    is_fitting = all(map(_is_supported, layers)) and not any(map(num_entering, layers[1:]))
    return FusedLayers(layers) if is_fitting else None


def _is_supported(layer: DecoderLayer) -> bool:
    products = [getattr(layer, name) for name in PRODUCTS]
    if not all(isinstance(product, PackedProduct) for product in products):
        return False
    return has_known_sizes(layer) and products[3].num_in % LANES == 0 and layer.activation in ACTIVATIONS


class FusedLayers:
    """Runs decoder layers: see `specdec_core.ops.decoder.fuse_layers`."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self._layers = tuple(layers)
        self._kept: list[Any] = []  # whose addresses are in the table
        self._placed: list[Any] = []  # the same of the caches, after their dtype
        self._table = np.zeros(len(layers), dtype=LAYER)
        for row, layer in zip(self._table, layers, strict=True):
            self._fill(row, layer)
        self._windows = self._table["window"].copy()
        self._window: int | None = None  # of the last forward pass
        self._copied: Sequence[int] = ()  # as the table has it
        self._ropes = Ropes({layer.rope: layer.head_dim for layer in layers})
        products: Any = [[getattr(layer, name) for name in PRODUCTS] for layer in layers]
        width = products[0][1].num_out
        columns = max(heads.num_out for heads, *_ in products), max(output.num_in for _, output, *_ in products)
        self._sizes = [
            max(heads.num_in for heads, *_ in products),
            *columns,
            max(down.num_in for *_, down in products),
            width,
        ]  # of a row of each buffer

    def _fill(self, row: Any, layer: DecoderLayer) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "rope", "scaling"):
            row[name] = getattr(layer, name)
        row["attends_by_amx"] = amx.serves(layer.query_key_value.dtype)  # type: ignore[attr-defined]
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
                product.uses_amx,
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
        self._place(caches, hidden.dtype)
        self._set_window(window)
        check_tokens(hidden, entering, slot_mapping, num_entering(self._layers[0]))
        copies_at = self._copies_at(copied, copies, hidden) if copied else NO_COPIES
        tokens = _Tokens.of(
            hidden.clone(memory_format=torch.contiguous_format),
            self._sizes,
            slot_mapping.contiguous(),
            self._ropes.at(ropes, positions, hidden),
            plan,
            entering,
            copies_at,
        )
        if rows is None or plan_of_rows is None:
            tokens.run_stages(self._table, NORM_INPUT, END)
            return tokens.hidden
        tokens.run_stages(self._table[:-1], NORM_INPUT, END)
        tokens.run_stages(self._table[-1:], NORM_INPUT, ATTENTION)
        chosen = tokens.only(rows, plan_of_rows, self._layers[-1], self._sizes)
        chosen.run_stages(self._table[-1:], ATTENTION, END)
        return chosen.hidden

    def _copies_at(self, copied: Sequence[int], copies: torch.Tensor | None, hidden: torch.Tensor) -> tuple[int, int]:
        """Note in the table which layers' inputs are copied. Returns the copies' address and the bytes of each."""
        check_copies(copied, copies, hidden)
        assert copies is not None
        if copied != self._copied:
            self._copied = ()  # until the table is right
            self._table["copy"] = 0
            self._table["copy"][list(copied)] = range(1, len(copied) + 1)
            self._copied = tuple(copied)
        return copies.data_ptr(), hidden.numel() * hidden.itemsize

    def _set_window(self, window: int | None) -> None:
        """Limit each layer's window to that of the forward pass."""
        if window != self._window:
            limit = np.int64(2**62) if window is None else window
            self._table["window"] = np.where(self._windows, np.minimum(self._windows, limit), window or 0)
            self._window = window  # last: an interrupt must not leave another window than this says

    def _place(self, caches: Sequence[Cache], dtype: torch.dtype) -> None:
        """Write the addresses of the caches to the table."""
        placed = [dtype, *(tensor for cache in caches for tensor in cache)]
        if len(placed) != len(self._placed) or any(map(is_not, placed, self._placed)):  # other caches than last time
            self._placed = []  # until all are right
            for row, layer, cache in zip(self._table, self._layers, caches, strict=True):
                self._place_layer(row, layer, cache, dtype)
            self._placed = placed

    def _place_layer(self, row: Any, layer: DecoderLayer, cache: Cache, dtype: torch.dtype) -> None:
        check_cache(layer, cache, dtype)
        keys, values = cache
        row["num_slots"] = min(keys.shape[0], values.shape[0])
        row["keys"], row["key_stride"] = keys.data_ptr(), keys.stride(0)
        row["values"], row["value_stride"] = values.data_ptr(), values.stride(0)


@frozen(eq=False)
class _Tokens:
    """The tokens of a forward pass, and memory for what layers compute of them.

    memory: buffers as for `run_stages`, one after the other: of inputs, heads, attended, gated, and outputs to be
        normed.
    starts: where each buffer begins.
    """

    hidden: torch.Tensor  # [num_tokens, width], padding included
    memory: torch.Tensor
    starts: Sequence[int]
    slots: torch.Tensor
    angles: Placed
    plan: AttentionPlan
    entering: torch.Tensor
    copies_at: tuple[int, int]  # as for `run_stages`

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        sizes: Sequence[int],
        slots: torch.Tensor,
        angles: Placed,
        plan: AttentionPlan,
        entering: torch.Tensor | None,
        copies_at: tuple[int, int] = NO_COPIES,
    ) -> _Tokens:
        """sizes: of a token in each buffer."""
        *starts, total = accumulate((hidden.shape[0] * size for size in sizes), initial=0)
        entering = hidden if entering is None else entering.contiguous()
        return cls(hidden, hidden.new_empty(total), starts, slots, angles, plan, entering, copies_at)

    def only(self, rows: torch.Tensor, plan: AttentionPlan, layer: DecoderLayer, sizes: Sequence[int]) -> _Tokens:
        """Return some of the tokens, int64 [n], before a layer's attention. plan: that of these tokens alone."""
        chosen = _Tokens.of(self.hidden.index_select(0, rows), sizes, self.slots, self.angles, plan, None)
        width = layer.query_key_value.num_out  # type: ignore[attr-defined]
        chosen._heads(width).copy_(self._heads(width).index_select(0, rows))
        return chosen

    def run_stages(self, table: np.ndarray, *stages: int) -> None:
        paths, like = paths_of(self.plan), LIKE[self.hidden.dtype]
        memory, size = self.memory.data_ptr(), self.memory.itemsize
        buffers = [memory + start * size for start in self.starts]
        is_run = in_parallel(
            run_stages,
            addresses_of(like.dtype),
            torch.get_num_threads(),
            like,
            table,
            stages,
            (self.hidden.data_ptr(), *buffers, self.entering.data_ptr()),
            self.copies_at,
            (paths.num_tokens, self.hidden.shape[1], self.slots.data_ptr(), self.angles.rows_address),
            self.angles.tables,
            (paths.chunks, paths.paths, paths.places),
        )
        if not is_run:
            num_slots = table["num_slots"].min()
            raise ValueError(f"a slot of {self.slots.tolist()} is not one of the {num_slots} of the KV cache")

    def _heads(self, width: int) -> torch.Tensor:
        """Return the buffer of heads as the stages of a layer use it, [num_tokens, width]."""
        start, num_tokens = self.starts[HEADS], self.hidden.shape[0]
        return self.memory[start : start + num_tokens * width].view(num_tokens, width)
