"""The quantizations "int8" and "int4" of torchao, an optional package. They quantize the weights of linear layers while
these are loaded, need no calibration, and run on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specdec_core.config.fields import shown
from specdec_core.errors import ConfigError, reason

INSTALL = "install torchao in the version of specdec-core's extra `quantization`"
GROUP_SIZE = 32
"""Weights that share a scale in int4, the fewest that torchao has."""


@frozen
class Scheme:
    """A quantization of weights that a user selects by a plain name.

    make: returns torchao's config. Raises ImportError without torchao, or with another version of it.
    fits: the layers that can be quantized, for an error.
    is_for_cpu: whether it runs on a CPU only.
    """

    make: Callable[[], Any]
    fits: str
    is_for_cpu: bool = False


def _int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(set_inductor_config=False)  # which is one for the whole process


def _int4() -> Any:
    from specdec_core.models.torchao_int4 import CpuInt4Config

    return CpuInt4Config(group_size=GROUP_SIZE, set_inductor_config=False)


SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme(_int8, "linear layers"),
    "int4": Scheme(_int4, f"linear layers whose inputs are a multiple of {GROUP_SIZE}, and outputs of 16", True),
}


def scheme_of(asked: Any) -> Scheme | None:
    """The scheme that the option `quantization` names. None if the option names none of SCHEMES, or nothing."""
    return SCHEMES.get(asked) if isinstance(asked, str) else None


def scheme_config(name: str, scheme: Scheme) -> Any:
    """Return transformers' quantization config of a scheme. Raises ConfigError that names the extra to install, if
    torchao is missing."""
    from transformers import TorchAoConfig

    try:
        return TorchAoConfig(scheme.make())
    except (ImportError, ValueError) as error:  # ValueError: a torchao too old for transformers
        raise ConfigError(
            f"quantization={shown(name)} needs torchao, which is missing here or has another version "
            f"({reason(error)}): {INSTALL}, or leave quantization out"
        ) from error


def refuse_device(asked: Any, device: torch.device) -> None:
    """Raise ConfigError if the option `quantization` names a scheme that does not run on this device."""
    scheme = scheme_of(asked)
    if scheme is not None and scheme.is_for_cpu and device.type != "cpu":
        raise ConfigError(
            f"quantization={shown(asked)} runs on a CPU only, not on {str(device)!r}: give 'int8', or a quantization "
            f"config of transformers that is for this device"
        )


def refuse_unquantized(asked: Any, model: nn.Module, name: str) -> None:
    """Raise ConfigError if the option `quantization` names a scheme that quantized none of a model's weights.

    name: the checkpoint's name, for the error.
    """
    scheme = scheme_of(asked)
    if scheme is not None and not any(map(is_traceable_wrapper_subclass, model.parameters())):
        raise ConfigError(
            f"quantization={shown(asked)} changes nothing in the model {name!r}: it is for {scheme.fits}, the LM head "
            f"not among them, and there are none. Leave quantization out"
        )
