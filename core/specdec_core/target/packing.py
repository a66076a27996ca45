"""Linear layers on a CPU: weights laid out as its matrix kernels read them, layers that share their input as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from attrs import define, field
from torch import nn

_OPS = torch.ops.mkldnn
"""oneDNN's linear layer with a weight that it laid out itself: what torch's own compiler uses on a CPU."""


@contextmanager
def recording_shared_inputs(model: nn.Module) -> Iterator[list[list[nn.Linear]]]:
    """While the block runs the model once, find the linear layers that it calls, and which of one module read the same
    tensor (a gated MLP's gate and up, attention's query, key and value). The list is filled when the block ends."""
    groups: list[list[nn.Linear]] = []
    calls: list[tuple[nn.Module, nn.Linear, torch.Tensor]] = []  # the tensors stay alive, so that identity means it
    handles = [
        child.register_forward_pre_hook(
            lambda child, args, parent=parent: calls.extend((parent, child, a) for a in args)
        )
        for parent in model.modules()
        for child in parent.children()
        if type(child) is nn.Linear
    ]
    try:
        yield groups
    finally:
        for handle in handles:
            handle.remove()
    sharing: dict[tuple[int, int], list[nn.Linear]] = {}
    for parent, linear, rows in calls:
        sharing.setdefault((id(parent), id(rows)), []).append(linear)
    groups += [list(dict.fromkeys(linears)) for linears in sharing.values()]


def pack_linears(model: nn.Module, groups: Sequence[Sequence[nn.Linear]] | None = None) -> None:
    """Replace the linear layers of a model, for inference, where torch has oneDNN; those of a group by one product.

    Layers in no group stay as they are: a model that does not call them may read their weights. groups: None for all,
    each alone. In bfloat16 the results are the same to the last bit. A weight that another module holds, too (an
    embedding tied to the output head), is copied.
    """
    if groups is None:
        groups = [[module] for module in model.modules() if isinstance(module, nn.Linear)]
    packed: dict[nn.Module, nn.Module] = {}
    for group in groups:
        layers = [linear for linear in group if _can_be_packed(linear) and linear not in packed]
        if len(layers) > 1 and len({linear.weight.dtype for linear in layers}) == 1:
            shared = _SharedInput.of(layers)
            packed |= {linear: _Piece(shared, index, linear) for index, linear in enumerate(layers)}
        else:
            packed |= {linear: PackedLinear(linear) for linear in layers}
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in packed:
                setattr(parent, name, packed[child])


def _can_be_packed(linear: nn.Linear) -> bool:
    # Exactly this class: a quantised layer may derive from it.
    return type(linear) is nn.Linear and linear.weight.device.type == "cpu" and _has_kernels(linear.weight.dtype)


def _has_kernels(dtype: torch.dtype) -> bool:
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not is_built or not torch.backends.mkldnn.enabled:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(_OPS._is_mkldnn_bf16_supported()))


def _linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    output: torch.Tensor = _OPS._linear_pointwise(rows, weight, bias, "none", [], "")
    return output


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight is laid out once, not at every call. `weight` is opaque but for dtype and shape."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = _OPS._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (as nn.Linear has it)
        return _linear(input, self.weight, self.bias)


@define(eq=False)
class _SharedInput:
    """Several linear layers as one product, computed when the first of them is called with an input."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    sizes: list[int]
    _input: torch.Tensor | None = None
    _pieces: dict[int, torch.Tensor] = field(factory=dict)  # of that input, not taken yet

    @classmethod
    def of(cls, linears: Sequence[nn.Linear]) -> _SharedInput:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = None
        if any(linear.bias is not None for linear in linears):
            biases: list[torch.Tensor] = [
                weight.new_zeros(each.out_features) if each.bias is None else each.bias for each in linears
            ]
            bias = torch.cat(biases)
        return cls(_OPS._reorder_linear_weight(weight, None), bias, [linear.out_features for linear in linears])

    def piece(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        if rows is not self._input or index not in self._pieces:
            product = _linear(rows, self.weight, self.bias)
            self._input, self._pieces = rows, dict(enumerate(torch.split(product, self.sizes, dim=-1)))
        piece = self._pieces.pop(index)
        if not self._pieces:
            self._input = None
        return piece


class _Piece(nn.Module):
    """One of the layers of a `_SharedInput`, in the place of the original."""

    def __init__(self, shared: _SharedInput, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = shared.weight  # for those who look at its dtype
        self._shared = shared
        self._index = index

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (as nn.Linear has it)
        return self._shared.piece(input, self._index)
