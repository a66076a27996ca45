"""Linear layers whose weights are reordered once, when the model is loaded: the reference, which uses oneDNN on a
CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

_ONEDNN = torch.ops.mkldnn
"""The operations that torch's own compiler uses for linear layers on a CPU."""


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a function that computes the layer, [..., in_features] -> [..., out_features], with a reordered copy of
    the weight; None if no such function is faster than torch's own layer. weight: [out_features, in_features]; bias:
    [out_features].

    In bfloat16 the function's results equal torch's to the last bit. A plugin's function may have the attribute
    `is_row_invariant`, true if no row's result depends on the other rows or their number.
    """
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not is_built or not torch.backends.mkldnn.enabled:
        return None
    if weight.dtype != torch.float32 and not (weight.dtype == torch.bfloat16 and _ONEDNN._is_mkldnn_bf16_supported()):
        return None
    packed = _ONEDNN._reorder_linear_weight(weight.detach(), None)

    def product(rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _ONEDNN._linear_pointwise(rows, packed, bias, "none", [], "")
        return output

    return product
