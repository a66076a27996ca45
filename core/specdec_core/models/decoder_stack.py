"""The decoder layers of a draft head, which a plugin may compute in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from specdec_core.models.attention import PagedAttention
from specdec_core.models.decoder import fused
from specdec_core.models.packed_linear import PackedLinear
from specdec_core.ops.decoder import PRODUCTS, Angles, DecoderLayer, Linears, Run


class DecoderStack(nn.Module):
    """All decoder layers of a draft head, as data. It is a module of the head without weights of its own, so that
    `BuildContext.speed_up` finds it and fuses the layers, if a plugin can. Until then, and if none can, `is_fused` is
    False, and the head runs its layers itself.

    describe: returns the layers, in order, once their weights are loaded. Their products are `Linears` of the head's
        linear layers. What it describes must be what the head's modules compute. No layers: they cannot be fused.
    first: the index of the first layer in the KV cache.
    """

    def __init__(self, describe: Callable[[], Sequence[DecoderLayer]]) -> None:
        super().__init__()
        self._describe, self.first = describe, 0
        self._attention: PagedAttention | None = None
        self._run: Run | None = None
        self._layers: Sequence[DecoderLayer] = ()
        self._num_layers = 0

    @property
    def is_fused(self) -> bool:
        return self._run is not None

    def forward(
        self,
        hidden: torch.Tensor,
        angles: Angles,
        positions: torch.Tensor | None = None,
        entering: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run all layers on a flat batch of tokens, inside of `LayerAttention.forwarding`.

        hidden: [num_tokens, width].
        angles: cos and sin of the rotary embedding, [num_positions, head_dim] each.
        positions: int64 [num_tokens], the row of each token there; None: token i has row i.
        entering: [num_tokens, any width], what the first layer's input of query, key and value begins with; None:
            nothing.
        rows: as for `LayerAttention.attend`, the tokens whose outputs are wanted; None: all.

        Returns [num_tokens or n, width].
        """
        assert self._attention is not None
        assert self._run is not None
        past = self.first + self._num_layers
        return self._attention.run_layers(self._run, self.first, past, hidden, [angles], positions, entering, rows)

    def shared_inputs(self) -> list[list[nn.Linear]]:
        """Return the groups of linear layers to be packed as one product."""
        self._layers = self._describe()
        found = [getattr(layer, name) for layer in self._layers for name in PRODUCTS]
        return [list(linears.layers) for linears in found if isinstance(linears, Linears)]

    def fuse(
        self,
        packed: Mapping[nn.Module, PackedLinear],
        fuse: Callable[[Sequence[DecoderLayer]], Run | None],
        attention: PagedAttention,
    ) -> None:
        """Fuse the layers, if possible. packed: from each linear layer of `shared_inputs` to its `PackedLinear`. fuse:
        the operation `fuse_layers`. attention: over the KV cache of these layers."""
        self._run = fused(self._layers, packed, fuse)
        self._attention, self._num_layers, self._layers = attention, len(self._layers), ()
