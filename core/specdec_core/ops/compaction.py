"""Moves keys and values to other slots of the paged cache: the reference operation in torch."""

from __future__ import annotations

import torch


def compact(keys: torch.Tensor, values: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Move the keys and values of slots source[i] to slots destination[i], in all layers of a group.

    keys, values: [num_layers, num_slots, num_kv_heads, width], of any dtype, each with a width of its own.
    source, destination: int64 [n], on the same device. A slot may be written that was read: destination[i] may be
        source[j] for j < i. The reverse is excluded: no slot is written before it is read, nor written twice.
    """
    for storage in (keys, values):  # index_select copies first: slots may overlap
        storage.index_copy_(1, destination, storage.index_select(1, source))
