"""A model that is a stack of decoder layers as `ops.decoder` has them: it is run without its own modules, so that a
plugin can compute many layers in one call. `decoder_trial` finds out whether a model is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn

from specdec_core.models.attention import PagedAttention
from specdec_core.models.packed_linear import PackedLinear, product_of
from specdec_core.ops.decoder import PRODUCTS, Angles, DecoderLayer, Run


@frozen(eq=False)
class RecordedDecoder:
    """A model's parts, as the trial forward pass found them. The layers' products are `Linears`.

    ropes: cos and sin of each rotary embedding at all positions, [max_model_len, head_dim].
    norm: the name of the last norm among the model's modules.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    layers: tuple[DecoderLayer, ...]
    ropes: tuple[Angles, ...]
    norm: str

    def attach(
        self,
        attention: PagedAttention,
        packed: Mapping[nn.Module, PackedLinear],
        fuse: Callable[[Sequence[DecoderLayer]], Run | None],
        norm: nn.Module,
        taps: Sequence[str],
    ) -> Decoder | None:
        """Make the decoder that runs. None if no plugin can compute these layers.

        packed: from each linear layer to its `PackedLinear`.
        fuse: the operation `fuse_layers`.
        norm: the last norm, which may have been replaced.
        taps: the proposer's.
        """
        run = fused(self.layers, packed, fuse)
        if run is None:
            return None
        copied = {tap: i for i in range(1, len(self.layers)) if (tap := f"input.{i}") in taps}
        return Decoder(self.embed, self.ropes, norm, attention, run, len(self.layers), copied, frozenset(taps))


@frozen(eq=False)
class Decoder:
    """A model's layers, fused by a plugin, from the embedding to the last norm.

    run: all layers in one call.
    copied: the taps that are inputs of layers after the first, with the index of each one's layer.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    ropes: tuple[Angles, ...]
    norm: nn.Module
    attention: PagedAttention
    run: Run
    num_layers: int
    copied: Mapping[str, int]
    taps: frozenset[str]

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run a flat batch of tokens, inside `attention.forwarding`. Returns the LM head's input for `rows`, and the
        taps' hidden states [num_tokens, width]."""
        hidden = self.embed(token_ids)
        features = {"input.0": hidden}
        copies = hidden.new_empty((len(self.copied), *hidden.shape)) if self.copied else None
        layers = tuple(self.copied.values())
        # Positions past the tables take the last row: only dead nodes have them.
        hidden = self.attention.run_layers(
            self.run, 0, self.num_layers, hidden, self.ropes, positions, copied=layers, copies=copies
        )
        features[f"input.{self.num_layers}"] = hidden
        if copies is not None:
            features |= zip(self.copied, copies.unbind(), strict=True)
        if "final" in self.taps:
            features["final"] = self.norm(hidden)
            needed = features["final"].index_select(0, rows)
        else:
            needed = self.norm(hidden.index_select(0, rows))
        return needed, {tap: features[tap] for tap in self.taps}


def fused(
    layers: Sequence[DecoderLayer],
    packed: Mapping[nn.Module, PackedLinear],
    fuse: Callable[[Sequence[DecoderLayer]], Run | None],
) -> Run | None:
    """Fuse layers whose products are `Linears`. None if a plugin cannot, or if one of the products was not packed as a
    whole. packed, fuse: as for `RecordedDecoder.attach`."""
    known = [found for layer in layers if (found := _with_products(layer, packed)) is not None]
    return fuse(known) if layers and len(known) == len(layers) else None


def _with_products(layer: DecoderLayer, packed: Mapping[nn.Module, PackedLinear]) -> DecoderLayer | None:
    products: dict[str, Any] = {}
    for name in PRODUCTS:
        linears: Any = getattr(layer, name)
        products[name] = product_of(linears.layers, packed)
    return None if None in products.values() else evolve(layer, **products)
