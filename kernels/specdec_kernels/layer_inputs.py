"""What `fuse_layers` takes on every device: which layers, and which tensors of a forward pass. Kernels compute
addresses from these, so a tensor that does not fit is refused with a ValueError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from specdec_core.ops.decoder import NORMS, PRODUCTS, Angles, Cache, DecoderLayer


def num_entering(layer: DecoderLayer) -> int:
    """Return how many columns of the input of query, key and value are not those of the layer's own input."""
    return layer.query_key_value.num_in - layer.attention_output.num_out  # type: ignore[attr-defined, no-any-return]


def has_known_sizes(layer: DecoderLayer) -> bool:
    """Return whether the sizes of a layer's products and norms are those of its heads, and heads can be rotated. The
    products have `num_in` and `num_out`."""
    heads, attended, gated, down = ((each.num_out, each.num_in) for each in (getattr(layer, name) for name in PRODUCTS))
    width, inner = attended[0], down[1]
    num_heads = layer.num_heads + 2 * layer.num_kv_heads
    wanted = [
        (num_heads * layer.head_dim, max(heads[1], width)),
        (width, layer.num_heads * layer.head_dim),
        (2 * inner, width),
        (width, inner),
    ]
    widths = dict.fromkeys(NORMS, width) | {"query_norm": layer.head_dim, "key_norm": layer.head_dim}
    widths["entering_norm"] = num_entering(layer)
    norms = ((getattr(layer, name), widths[name]) for name in NORMS)
    is_fitting = [heads, attended, gated, down] == wanted and layer.head_dim % 2 == 0
    return is_fitting and all(norm is None or len(norm.weight) == size for norm, size in norms)


def check_tokens(
    hidden: torch.Tensor, entering: torch.Tensor | None, slot_mapping: torch.Tensor, width_entering: int
) -> None:
    dtype, num_tokens = hidden.dtype, hidden.shape[0]
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != (num_tokens,):
        raise ValueError(
            f"slot_mapping is {slot_mapping.dtype} {list(slot_mapping.shape)}: give torch.int64 [{num_tokens}]"
        )
    given = None if entering is None else (entering.dtype, entering.shape)
    if given != ((dtype, (num_tokens, width_entering)) if width_entering else None):
        raise ValueError(
            f"entering is {given}: the input of query, key and value begins with {width_entering} columns of it; give "
            + (f"{dtype} [{num_tokens}, {width_entering}]" if width_entering else "None")
        )


def check_copies(copied: Sequence[int], copies: torch.Tensor | None, hidden: torch.Tensor) -> None:
    wanted = (len(copied), *hidden.shape)
    if copies is None or copies.dtype != hidden.dtype or copies.shape != wanted or not copies.is_contiguous():
        given = "None" if copies is None else f"{copies.dtype} {list(copies.shape)}, strides {copies.stride()}"
        raise ValueError(f"copies is {given}: give {hidden.dtype} {list(wanted)}, contiguous")


def check_cache(layer: DecoderLayer, cache: Cache, dtype: torch.dtype) -> None:
    for tensor in cache:
        is_row = tensor.dim() == 3 and tensor.stride()[1:] == (layer.head_dim, 1) and tensor.dtype == dtype
        if not is_row or tensor.shape[1:] != (layer.num_kv_heads, layer.head_dim):
            raise ValueError(
                f"a KV cache is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}: give "
                f"{dtype} [num_slots, {layer.num_kv_heads}, {layer.head_dim}] with contiguous rows"
            )


def check_tables(ropes: Sequence[Angles], widths: Mapping[int, int], dtype: torch.dtype) -> None:
    """widths: {index of a rotary embedding: head_dim}."""
    for rope, width in widths.items():
        for table in ropes[rope]:
            num_positions = len(ropes[rope][0]) if table.ndim == 2 else 0
            if not num_positions or table.dtype != dtype or table.shape != (num_positions, width):
                raise ValueError(
                    f"cos or sin is {table.dtype} {list(table.shape)}: give {dtype} [num_positions, {width}] each"
                )


def check_positions(positions: torch.Tensor | None, num_tokens: int, num_rows: int) -> None:
    """num_rows: of the shortest table of angles."""
    if positions is None:
        if num_rows < num_tokens:
            raise ValueError(f"cos or sin has fewer rows than the {num_tokens} tokens: give one for each token")
    elif positions.dtype != torch.int64 or positions.shape != (num_tokens,):
        raise ValueError(f"positions is {positions.dtype} {list(positions.shape)}: give int64 [{num_tokens}]")
