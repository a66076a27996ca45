"""What each rank holds of a model, and how a model becomes such a part: `shrink` before weights are loaded, `connect`
afterwards. `split_plan` finds out what that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import nn

from specdec_core.errors import CompatibilityError
from specdec_core.models.families import GROUPS, HEAD_COUNTS
from specdec_core.models.split_modules import Part, SplitHead, SplitLinear
from specdec_core.models.split_styles import Style

Interval = tuple[int, int]


@frozen
class Cut:
    """What a rank holds of a parameter: these intervals of one dimension, side by side. shape: of the whole."""

    shape: tuple[int, ...]
    dim: int
    intervals: tuple[Interval, ...]

    @property
    def part_shape(self) -> tuple[int, ...]:
        width = sum(end - start for start, end in self.intervals)
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])

    def read(self, whole: Any) -> torch.Tensor:
        """Read this part of a tensor, or of what safetensors' `get_slice` returns."""
        before = (slice(None),) * self.dim
        parts = [whole[(*before, slice(start, end))] for start, end in self.intervals]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)


@frozen
class Split:
    """What a rank holds of a model.

    cuts: {name of a parameter: what of it}. Parameters that are not here are whole on each rank.
    styles: {name of a module: its style}, of those that exchange something.
    heads: {name of an attention module: its numbers of query and of key heads on a rank}.
    kv_shapes: (num_kv_heads, key_dim, value_dim) of each layer on a rank.
    head: the name of the LM head; None: whole on each rank.
    is_tied: whether the LM head's weight is the embedding's, of which a rank then uses a part.
    """

    cuts: Mapping[str, Cut]
    styles: Mapping[str, Style]
    heads: Mapping[str, tuple[int, int]]
    kv_shapes: tuple[tuple[int, int, int], ...]
    head: str | None
    is_tied: bool

    def check(self, shapes: Sequence[tuple[int, int, int]]) -> None:
        """Raise CompatibilityError if the layers of a rank's part have keys and values of other shapes, [layers] of
        (num_kv_heads, key_dim, value_dim)."""
        if tuple(shapes) != self.kv_shapes:
            raise CompatibilityError(
                f"a rank's layers have keys and values of the shapes {list(dict.fromkeys(shapes))}, and the plan for "
                f"splitting them gives {list(dict.fromkeys(self.kv_shapes))}: give tensor_parallel_size=1"
            )


def shrink(model: nn.Module, split: Split) -> None:
    """Give the parameters of a model on the meta device the shapes of a rank's part, and attention modules the rank's
    numbers of heads."""
    for name, cut in split.cuts.items():
        owner, _, own = name.rpartition(".")
        module, whole = model.get_submodule(owner), model.get_parameter(name)
        setattr(module, own, nn.Parameter(whole.new_empty(cut.part_shape), requires_grad=False))
        if own == "weight" and type(module) is nn.Linear:
            module.out_features, module.in_features = cut.part_shape
    for name, (num_heads, num_kv_heads) in split.heads.items():
        attention = model.get_submodule(name)
        now = {each: num_heads if is_query else num_kv_heads for each, is_query in HEAD_COUNTS.items()}
        for each, number in (now | {GROUPS: num_heads // num_kv_heads}).items():
            if hasattr(attention, each):
                setattr(attention, each, number)


def connect(model: nn.Module, split: Split, part: Part) -> None:
    """Let the modules of a rank's part exchange what the ranks compute. The model has been shrunk, and loaded unless it
    is on the meta device."""
    for name, style in split.styles.items():
        module = model.get_submodule(name)
        if style.dim is not None:
            _replace(model, name, SplitLinear(module, style, part))  # type: ignore[arg-type]
        elif style.divides:
            module.register_forward_pre_hook(lambda module, args: (args[0] / part.size, *args[1:]))
        else:
            module.register_forward_hook(lambda module, args, output: part.sum(output))
    if split.head is not None:
        head: Any = model.get_submodule(split.head)
        if split.is_tied:
            head = _own_rows(head, part)
        _replace(model, split.head, SplitHead(head, part))


def _own_rows(head: nn.Linear, part: Part) -> nn.Linear:
    """Make a linear layer of this rank's rows of a whole one, without copying them."""
    num_rows = head.out_features // part.size
    own = nn.Linear(head.in_features, num_rows, bias=False, device="meta")
    rows = slice(part.rank * num_rows, (part.rank + 1) * num_rows)
    own.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        own.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    return own


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, module)
