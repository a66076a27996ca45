"""A quantization method for tests. It rounds every weight, and needs no package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin

NAME = "rounding_test"
MISSING = "a-package"


class RoundingConfig(QuantizationConfigMixin):
    """The configuration of the rounding method. bits: number of binary digits that are kept after the point."""

    def __init__(self, bits: int = 2, **kwargs: Any) -> None:
        self.quant_method, self.bits = NAME, bits


@contextmanager
def rounding_quantizer() -> Iterator[list[str]]:
    """A context manager in which transformers knows the rounding method.

    Yields a list of events: "made 2" is added when weights are quantized to 2 bits on load, "read 2" when a checkpoint
    that is already quantized is loaded.
    """
    ran: list[str] = []

    class Rounding(HfQuantizer):
        requires_calibration = False
        is_trainable = False

        def validate_environment(self, *args: Any, **kwargs: Any) -> None:
            if self.quantization_config.bits == 0:
                raise ImportError(f"rounding to 0 bits requires a package (`pip install {MISSING}`)")

        def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
            return False

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            ran.append(f"{'read' if self.pre_quantized else 'made'} {self.quantization_config.bits}")
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_((weight * 2**self.quantization_config.bits).round() / 2**self.quantization_config.bits)
            return model

    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = RoundingConfig
    auto.AUTO_QUANTIZER_MAPPING[NAME] = Rounding
    try:
        yield ran
    finally:
        del auto.AUTO_QUANTIZATION_CONFIG_MAPPING[NAME], auto.AUTO_QUANTIZER_MAPPING[NAME]
