"""Replaces linear layers by the operation `pack_linear`, which reorders weights once. Layers with the same input, such
as query, key and value projections, are computed as one matrix product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import compress

import torch
from attrs import define, field
from torch import nn

Product = Callable[[torch.Tensor], torch.Tensor]
PackLinear = Callable[[torch.Tensor, torch.Tensor | None], Product | None]


@contextmanager
def recording_shared_inputs(model: nn.Module) -> Iterator[list[list[nn.Linear]]]:
    """A context that finds linear layers with the same input. Run the model once inside it.

    Yields a list, which is filled on exit with groups of linear layers. The layers of a group have the same parent
    module and were called with the same tensor, such as the query, key and value projections of an attention module.
    Layers that were not called are in no group.
    """
    groups: list[list[nn.Linear]] = []
    calls: list[tuple[nn.Module, nn.Linear, torch.Tensor]] = []  # keeps tensors alive, so that their ids stay unique
    with ExitStack() as hooks:
        for parent in model.modules():
            for child in parent.children():
                if type(child) is nn.Linear:
                    hook = lambda child, args, parent=parent: calls.extend((parent, child, a) for a in args)  # noqa: E731
                    hooks.enter_context(child.register_forward_pre_hook(hook))
        yield groups
    sharing: dict[tuple[int, int], list[nn.Linear]] = {}
    for parent, linear, rows in calls:
        sharing.setdefault((id(parent), id(rows)), []).append(linear)
    groups += [list(dict.fromkeys(linears)) for linears in sharing.values()]


def pack_linears(
    model: nn.Module, pack: PackLinear, groups: Sequence[Sequence[nn.Linear]] | None = None
) -> Mapping[nn.Module, PackedLinear]:
    """Replace a model's linear layers, for inference, by packed ones. The layers of a group become one matrix product.

    pack: the operation `pack_linear`. It gets a weight and a bias, and returns a function from the layer's input to its
        output, or None to leave the layer as it is.
    groups: lists of layers with the same input. Layers in no group stay unchanged, since a model may read their weights
        without calling them. None: all layers are packed, each on its own.

    A weight that another module also holds (an embedding tied to the LM head) is copied.

    Returns the packed layer for each layer that was replaced.
    """
    if groups is None:
        groups = [[module] for module in model.modules() if isinstance(module, nn.Linear)]
    packed: dict[nn.Module, PackedLinear] = {}
    for group in groups:
        # A quantized layer, or its weight, may be of a class that derives from the plain one.
        is_plain = (type(each) is nn.Linear and type(each.weight.detach()) is torch.Tensor for each in group)
        layers = [linear for linear in compress(group, is_plain) if linear not in packed]
        is_joint = len({linear.weight.dtype for linear in layers}) == 1
        for together in [layers] if is_joint else [[linear] for linear in layers]:
            product = pack(*_joined(together))
            if product is not None:
                shared = _SharedInput(product, [linear.out_features for linear in together])
                packed |= {linear: PackedLinear(linear, shared, index) for index, linear in enumerate(together)}
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in packed:
                setattr(parent, name, packed[child])
    return packed


def product_of(linears: Sequence[nn.Linear], packed: Mapping[nn.Module, PackedLinear]) -> Product | None:
    """Return the product that computes these layers, and no others, side by side. None if there is none."""
    found = [packed[linear] for linear in linears if linear in packed]
    products = {each.product for each in found}
    is_whole = [each.index for each in found] == list(range(len(linears))) and len(products) == 1
    return products.pop() if is_whole and found[0].num_joined == len(linears) else None


def _joined(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Concatenate linear layers. Returns the weight and bias of one layer that computes the outputs of all of them, in
    order. The bias is None if no layer has one."""
    weight = torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight
    if all(linear.bias is None for linear in linears):
        return weight.detach(), None
    biases = (weight.new_zeros(each.out_features) if each.bias is None else each.bias.detach() for each in linears)
    return weight.detach(), torch.cat(list(biases))


@define(eq=False)
class _SharedInput:
    """Computes linear layers that get the same input as one matrix product, when the first of these layers is called.
    The outputs of the other layers are kept until those layers are called."""

    product: Product
    sizes: list[int]
    _input: torch.Tensor | None = None
    _pieces: dict[int, torch.Tensor] = field(factory=dict)  # of that input, not taken yet

    def piece(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        if len(self.sizes) == 1:
            return self.product(rows)
        if rows is not self._input or index not in self._pieces:
            self._input, self._pieces = rows, dict(enumerate(torch.split(self.product(rows), self.sizes, -1)))
        piece = self._pieces.pop(index)
        if not self._pieces:
            self._input = None
        return piece


class PackedLinear(nn.Module):
    """Replaces an `nn.Linear` whose weight has been packed. `forward` returns this layer's outputs from the matrix
    product of its group. `weight` has the original's shape, dtype and device, but all its values are NaN.

    product: the matrix product of the group, which has num_joined layers. index: this layer's place among them.
    is_row_invariant: whether the product says that no row's result depends on other rows.
    """

    def __init__(self, linear: nn.Linear, shared: _SharedInput, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight.detach().new_full((1, 1), torch.nan).expand(linear.weight.shape)
        self._shared, self.index = shared, index
        self.product, self.num_joined = shared.product, len(shared.sizes)
        self.is_row_invariant = getattr(shared.product, "is_row_invariant", False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (as nn.Linear has it)
        return self._shared.piece(input, self.index)
