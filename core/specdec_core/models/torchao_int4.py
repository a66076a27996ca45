"""torchao's 4-bit weights for a CPU. Importing this module raises ImportError without torchao."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import nn
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import quantize_
from torchao.quantization.transform_module import register_quantize_module_handler

OUTPUTS = 16
"""torch packs 4-bit weights of layers whose number of outputs is a multiple of this."""


@dataclass
class CpuInt4Config(PrototypeInt4WeightOnlyConfig):  # type: ignore[misc]
    """torchao's config of 4-bit weights that torch's kernel for a CPU multiplies. Layers that do not fit the kernel, or
    the group size, stay as they are."""


@register_quantize_module_handler(CpuInt4Config)  # type: ignore[untyped-decorator]
def _quantize(module: nn.Linear, config: CpuInt4Config) -> nn.Module:
    if module.weight.shape[0] % OUTPUTS == 0:
        base = PrototypeInt4WeightOnlyConfig
        quantize_(module, base(**{each.name: getattr(config, each.name) for each in fields(base)}))
    return module
