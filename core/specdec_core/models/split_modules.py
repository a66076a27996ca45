"""Layers of which each rank computes a part: what ranks exchange, and the modules that do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import nn

from specdec_core.models.split_styles import Style


@frozen(eq=False)
class Part:
    """Which part of a model a rank holds.

    rank: from 0 to size - 1. size: the number of ranks.
    gather: exchanges a tensor. Every rank calls it with a tensor of the same shape and dtype, and gets the tensors of
        all ranks, in their order.
    """

    rank: int
    size: int
    gather: Callable[[torch.Tensor], Sequence[torch.Tensor]]

    @classmethod
    def pretended(cls, size: int) -> Part:
        """The first of `size` ranks, without others: for models on the meta device."""
        return cls(0, size, lambda tensor: [tensor] * size)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Add the tensors of all ranks, in the order of the ranks: so all get the same bits, and a row's do not depend
        on other rows. In less than float32, numbers are added in float32 and rounded once."""
        first, *others = self.gather(partial)
        total = first.float()
        for other in others:
            total = total + other
        return total.to(partial.dtype)

    def side_by_side(self, outputs: torch.Tensor) -> torch.Tensor:
        """Put the last dimensions of all ranks' tensors [..., n] side by side, in the order of the ranks."""
        return torch.cat(list(self.gather(outputs)), dim=-1)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the last dimension of a tensor [..., n] that every rank has."""
        width = rows.shape[-1] // self.size
        return rows.narrow(-1, self.rank * width, width)


class SplitLinear(nn.Module):
    """Takes the place of a linear layer of which each rank holds a part. `linear` is this rank's part. A bias that is
    added to a sum is added once, after it."""

    def __init__(self, linear: nn.Linear, style: Style, part: Part) -> None:
        super().__init__()
        self.linear, self._style, self._part = linear, style, part
        self.bias_of_sum = linear.bias if style.sums else None
        if style.sums:
            linear.register_parameter("bias", None)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Any:
        return self.linear.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (as nn.Linear has it)
        output: torch.Tensor = self.linear(self._part.own(input) if self._style.narrows else input)
        if self._style.gathers:
            return self._part.side_by_side(output)
        output = self._part.sum(output)
        return output if self.bias_of_sum is None else output + self.bias_of_sum


class SplitHead(nn.Module):
    """An LM head of which each rank holds the rows of some tokens. Logits are whole on every rank."""

    def __init__(self, linear: nn.Linear, part: Part) -> None:
        super().__init__()
        self.linear, self._part = linear, part

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (as nn.Linear has it)
        return self._part.side_by_side(self.linear(input))

    def rows(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function that maps token ids [...] to their rows [..., width] of the whole head's weight; None if
        the head has a bias. All ranks must call it with the same ids."""
        if self.linear.bias is not None:
            return None
        weight, part = self.linear.weight.detach(), self._part  # the weight stays as it is when the layer is packed

        def rows_of(token_ids: torch.Tensor) -> torch.Tensor:
            owner, row = token_ids // len(weight), token_ids % len(weight)
            found = torch.stack(list(part.gather(weight[row])))  # of the wrong tokens on all ranks but the owner
            return found.gather(0, owner[None, ..., None].expand(1, *found.shape[1:]))[0]

        return rows_of
