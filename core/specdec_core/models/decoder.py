"""A model that is a stack of decoder layers as `ops.decoder` has them: it is run without its own modules, so that a
plugin can compute many layers in one call. `decoder_trial` finds out whether a model is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
        copied = {f"input.{i}": i for i in range(1, len(self.layers)) if f"input.{i}" in taps}
        places = {tap: place for place, tap in enumerate(copied)}
        layers = tuple(copied.values())
        return Decoder(self.embed, self.ropes, norm, attention, run, len(self.layers), layers, places, frozenset(taps))


class Features(Mapping[str, torch.Tensor]):
    """{tap: [num_tokens, width]} of one forward pass. A tensor for each tap is only made where it is asked for: in
    plain decoding, making them takes a percent of a step.

    copies: [number, num_tokens, width], of taps with these places there. others: of the other taps.
    """

    __slots__ = ("_copies", "_others", "_places")

    def __init__(
        self, copies: torch.Tensor | None, places: Mapping[str, int], others: Mapping[str, torch.Tensor]
    ) -> None:
        self._copies, self._places, self._others = copies, places, others

    def __getitem__(self, tap: str) -> torch.Tensor:
        if self._copies is None or tap not in self._places:
            return self._others[tap]
        return self._copies[self._places[tap]]

    def __iter__(self) -> Iterator[str]:
        yield from self._places
        yield from self._others

    def __len__(self) -> int:
        return len(self._places) + len(self._others)


@frozen(eq=False)
class Decoder:
    """A model's layers, fused by a plugin, from the embedding to the last norm.

    run: all layers in one call.
    copied: the indices of layers after the first whose inputs are taps, and the places of these taps among them.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    ropes: tuple[Angles, ...]
    norm: nn.Module
    attention: PagedAttention
    run: Run
    num_layers: int
    copied: tuple[int, ...]
    places: Mapping[str, int]
    taps: frozenset[str]

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Run a flat batch of tokens, inside `attention.forwarding`. Returns the LM head's input for `rows`, and the
        taps' hidden states {tap: [num_tokens, width]}."""
        entered = self.embed(token_ids)
        copies = entered.new_empty((len(self.copied), *entered.shape)) if self.copied else None
        # Positions past the tables take the last row: only dead nodes have them.
        hidden = self.attention.run_layers(
            self.run, 0, self.num_layers, entered, self.ropes, positions, copied=self.copied, copies=copies
        )
        others = {}
        if "final" in self.taps:
            final = others["final"] = self.norm(hidden)
            needed = final.index_select(0, rows)
        else:
            needed = self.norm(hidden.index_select(0, rows))
        if len(self.taps) > len(self.copied):
            ends = {"input.0": entered, f"input.{self.num_layers}": hidden}
            others |= {tap: each for tap, each in ends.items() if tap in self.taps}
        return needed, Features(copies, self.places, others)


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
