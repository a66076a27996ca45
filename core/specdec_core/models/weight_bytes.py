"""Determines the bytes of a model's weights, also of weights that will be quantized while they are loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers. A tensor that modules share (tied weights) is counted once, and a
    quantized tensor as those that it consists of: integers, scales and zero points."""
    return sum({id(tensor): _bytes(tensor) for tensor in (*model.parameters(), *model.buffers())}.values())


def quantize_empty(model: Any, quantizer: Any, device: torch.device) -> Any:
    """Quantize the weights of a model on the meta device as loading will, without values. Returns the model, which
    cannot run any more.

    quantizer: transformers' quantizer. Only torchao's are followed; for others, and for schemes that look at the
        weights' values, the weights keep the size that they have before.
    """
    if not isinstance(quantizer, TorchAoHfQuantizer):
        return model
    quantizer.preprocess_model(model)
    names = [name for name, _ in model.named_parameters() if quantizer.param_needs_quantization(model, name)]
    quantize = quantizer.get_quantize_ops()
    # Fake tensors claim to be on the device, for whose kernels the weights are packed.
    with FakeTensorMode():
        for name in names:
            empty = model.get_parameter(name)
            weight = torch.empty(empty.shape, dtype=empty.dtype, device=device)
            try:
                quantize.convert({name: weight}, model=model, full_layer_name=name, missing_keys=set())
            except Exception:  # a scheme of the user's own may read values, or lack a package, as loading will say
                module, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(module), attribute, empty)
    return model


def _bytes(tensor: torch.Tensor) -> int:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_bytes(getattr(tensor, name)) for name in names)
    return tensor.nbytes
