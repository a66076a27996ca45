"""Chooses the quantization with which transformers loads a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.quantizers import AutoQuantizationConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, get_hf_quantizer

from specdec_core.config.fields import shown
from specdec_core.errors import ConfigError

EXAMPLE = "{'quant_method': 'bitsandbytes', 'load_in_4bit': True}"


def quantized_loading(asked: Any, config: PretrainedConfig, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of transformers' from_pretrained that load a model quantized. Empty if the model is
    not quantized.

    asked: the engine's option `quantization`: a name, a mapping, one of transformers' configurations, or None.
    config: the checkpoint's configuration.

    Loads no weights. Raises ConfigError if the quantization is not available: a package or the hardware is missing, or
    the method needs a calibrated checkpoint.
    """
    chosen, own = quantization_config(asked, config), own_quantization(config)
    if chosen is None and own is None:
        return {}
    # Quantized weights may not be movable, so they are loaded directly to their device.
    device_map = None if device.type == "cpu" else {"": device}
    try:
        get_hf_quantizer(deepcopy(config), deepcopy(chosen), device_map, weights_only=True, user_agent={})
    except Exception as error:  # transformers' quantizers raise different exceptions
        what = f"quantization={shown(asked)}" if own is None else f"the checkpoint's quantization {_method(own)!r}"
        raise ConfigError(
            f"{what} is not available for the model {config.name_or_path!r} here: {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Install what is missing, or choose another quantization or checkpoint"
        ) from error
    return {"quantization_config": chosen, "device_map": device_map}


def own_quantization(config: PretrainedConfig) -> Any:
    """Return the quantization_config in a checkpoint's configuration or, as in transformers, in the configuration of
    its text decoder. None if there is none."""
    return getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )


def refuse_unknown_quantization(own: Any, model: str) -> None:
    """Raise ConfigError if transformers does not know the checkpoint's quantization. transformers itself would only log
    a message, and load the weights as if they were not quantized.

    own: `quantization_config` of the checkpoint's config.json. model: the checkpoint's name, for the error.
    """
    if own is None:
        return
    if isinstance(own, Mapping):
        method = own.get("quant_method")
        method = getattr(method, "value", method)
        has_bits = own.get("load_in_8bit") or own.get("load_in_4bit")
        if has_bits or (isinstance(method, str) and method in AUTO_QUANTIZATION_CONFIG_MAPPING):
            return
        what = f"its quantization_config has quant_method={shown(method)}, which transformers does not know"
    else:
        what = f"its quantization_config is {shown(own)}, not a mapping with a quant_method"
    known = sorted({re.sub("_[48]bit$", "", name) for name in AUTO_QUANTIZATION_CONFIG_MAPPING})
    raise ConfigError(
        f"the checkpoint {model!r} cannot be loaded as it is quantized: {what}. Supported are {', '.join(known)} "
        f"(bitsandbytes with load_in_4bit or load_in_8bit). Use another checkpoint, or import the package that "
        f"registers the method with transformers; if the weights are not quantized, take quantization_config out of "
        f"config.json"
    )


def quantization_config(asked: Any, config: PretrainedConfig) -> Any:
    """Return the quantization_config argument for transformers' from_pretrained. None: transformers uses the
    checkpoint's own, if it has one.

    asked: the engine's option `quantization`: a name, a mapping, one of transformers' configurations, or None.
    config: the checkpoint's configuration.

    Raises ConfigError if the checkpoint is quantized with another method, if the name is unknown, or if further
    settings are required, such as the number of bits.
    """
    own = own_quantization(config)
    if asked is None:
        return None
    method = asked if isinstance(asked, str) else _method(asked)
    if method is None:
        raise ConfigError(
            f"quantization={shown(asked)} names no quant_method: give a name such as 'fp8', or transformers' "
            f"quantization config as a mapping or an object, such as {EXAMPLE}"
        )
    if own is not None and method != _method(own):
        raise ConfigError(
            f"quantization={method!r}, but the checkpoint is quantized with {_method(own)!r}: leave it out"
        )
    if isinstance(asked, str):
        return None if own is not None else _chosen({"quant_method": asked}, asked)
    return _chosen(asked, asked) if isinstance(asked, Mapping) else asked


def _method(given: Any) -> str | None:
    """Return the quant_method of a quantization config (mapping or object), or "bitsandbytes" if it sets load_in_8bit
    or load_in_4bit. None if it names no method."""
    values = given if isinstance(given, Mapping) else getattr(given, "__dict__", {})
    if values.get("load_in_8bit") or values.get("load_in_4bit"):
        return "bitsandbytes"
    method = values.get("quant_method")
    method = getattr(method, "value", method)
    return method if isinstance(method, str) else None


def _chosen(mapping: Mapping[str, Any], asked: Any) -> Any:
    try:
        chosen = AutoQuantizationConfig.from_dict(dict(mapping))
        is_complete = getattr(chosen, "is_quantizable", lambda: True)()
    except ImportError as error:
        raise ConfigError(
            f"quantization={shown(asked)} needs a package that is not installed: {str(error).rstrip('.')}. Install it, "
            f"or leave quantization out"
        ) from error
    except Exception as error:  # each of transformers' configurations checks itself in its own way
        raise ConfigError(
            f"quantization={shown(asked)} is not known, or leaves something to choose: {type(error).__name__}: "
            f"{error}. Give transformers' quantization config as a mapping, such as {EXAMPLE}"
        ) from error
    if not is_complete:
        raise ConfigError(f"quantization={shown(asked)} does not name the bits: give a mapping, such as {EXAMPLE}")
    return chosen
