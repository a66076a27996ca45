"""Chooses the quantization with which transformers loads a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from inspect import signature
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.quantizers import AutoQuantizationConfig, HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    get_hf_quantizer,
)

from specdec_core.config.fields import shown
from specdec_core.errors import ConfigError, reason
from specdec_core.models.weight_only import SCHEMES, refuse_device, scheme_config, scheme_of

EXAMPLE = "{'quant_method': 'bitsandbytes', 'load_in_4bit': True}"
ON_A_CPU = f"; {' and '.join(map(repr, SCHEMES))} run on a CPU"


def quantized_loading(asked: Any, config: PretrainedConfig, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of transformers' from_pretrained that load a model quantized. Empty if the model is
    not quantized. See `loading_quantizer`."""
    if loading_quantizer(asked, config, device) is None:
        return {}
    return {"quantization_config": quantization_config(asked, config), "device_map": _device_map(device)}


def loading_quantizer(asked: Any, config: PretrainedConfig, device: torch.device) -> HfQuantizer | None:
    """Return the quantizer of transformers that loads a model's weights. None if they are not quantized.

    asked: the engine's option `quantization`: a name, a mapping, one of transformers' configurations, or None.
    config: the checkpoint's configuration.

    Loads no weights. Raises ConfigError if the quantization is not available: a package or the hardware is missing, or
    the method needs a calibrated checkpoint.
    """
    refuse_device(asked, device)
    chosen, own = quantization_config(asked, config), own_quantization(config)
    if chosen is None and own is None:
        return None
    try:
        quantizer, _, _ = get_hf_quantizer(
            deepcopy(config), deepcopy(chosen), _device_map(device), weights_only=True, user_agent={}
        )
    except Exception as error:  # transformers' quantizers raise different exceptions
        what = f"quantization={shown(asked)}" if own is None else f"the checkpoint's quantization {_method(own)!r}"
        raise ConfigError(
            f"{what} cannot be used for the model {config.name_or_path!r} here: {_lack(error)} another quantization or "
            f"checkpoint{ON_A_CPU if own is None else ''}"
        ) from error
    return quantizer


def _device_map(device: torch.device) -> dict[str, torch.device] | None:
    """transformers' device_map. Quantized weights may not be movable, so they are loaded directly to their device."""
    return None if device.type == "cpu" else {"": device}


def _lack(error: Exception) -> str:
    """What a quantization of transformers lacks, from its error, and the first words of what to do."""
    package = re.search(r"pip install +['\"]?([A-Za-z][\w.-]*)", str(error)) if isinstance(error, ImportError) else None
    if package is None:
        return f"transformers says {reason(error)!r}. Choose"
    return f"the package {package[1]} is missing. Install it (pip install {package[1]}), or choose"


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
    raise ConfigError(
        f"the checkpoint {model!r} cannot be loaded as it is quantized: {what}. Supported are {', '.join(_known())} "
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
            f"quantization={shown(asked)} names no quant_method: give a name such as 'int8', or transformers' "
            f"quantization config as a mapping or an object, such as {EXAMPLE}"
        )
    if own is not None and method != _method(own):
        raise ConfigError(
            f"quantization={method!r}, but the checkpoint is quantized with {_method(own)!r}: leave it out"
        )
    if own is None and getattr(AUTO_QUANTIZER_MAPPING.get(method), "requires_calibration", False):
        raise ConfigError(
            f"quantization={shown(asked)} is for checkpoints whose weights were calibrated and saved with {method!r}, "
            f"and {config.name_or_path!r} is not quantized. Give such a checkpoint, which needs no quantization "
            f"option, or a quantization that needs no calibration{ON_A_CPU}"
        )
    if isinstance(asked, str):
        if own is not None:
            return None
        scheme = scheme_of(asked)
        return scheme_config(asked, scheme) if scheme else _chosen({"quant_method": asked}, asked)
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


def _known() -> list[str]:
    """The quantization methods of transformers."""
    return sorted({re.sub("_[48]bit$", "", name) for name in AUTO_QUANTIZATION_CONFIG_MAPPING})


def _chosen(mapping: Mapping[str, Any], asked: Any) -> Any:
    """Return transformers' quantization config of a mapping.

    asked: the option `quantization`, for errors.

    Raises ConfigError if the method is unknown, a package is missing or the mapping is incomplete.
    """
    missing = _missing_settings(mapping, asked)
    if missing:
        example = {**mapping, missing[0]: ...}
        raise ConfigError(
            f"quantization={shown(asked)} leaves {' or '.join(missing)} open: give a mapping that has it, as "
            f"{str(example).replace('Ellipsis', '...')}. A checkpoint that is quantized needs no quantization "
            f"option{ON_A_CPU}"
        )
    try:
        return AutoQuantizationConfig.from_dict(dict(mapping))
    except ImportError as error:
        raise ConfigError(
            f"quantization={shown(asked)} cannot be used here: {_lack(error)} another quantization{ON_A_CPU}"
        ) from error
    except Exception as error:  # each of transformers' configurations checks itself in its own way
        raise ConfigError(
            f"quantization={shown(asked)} has values that transformers does not accept: {reason(error)}. Correct them, "
            f"as in {EXAMPLE}"
        ) from error


def _missing_settings(mapping: Mapping[str, Any], asked: Any) -> list[str]:
    """Names the settings that a quantization config must have and this mapping has not. Raises ConfigError if the
    method is unknown."""
    method = _method(mapping)
    if str(method).startswith("bitsandbytes"):
        return [] if mapping.get("load_in_8bit") or mapping.get("load_in_4bit") else ["load_in_8bit", "load_in_4bit"]
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ConfigError(
            f"quantization={shown(asked)} is not known: give {', '.join(map(repr, SCHEMES))}, the name of a method of "
            f"transformers ({', '.join(_known())}), or its quantization config as a mapping, such as {EXAMPLE}"
        )
    settings = signature(AUTO_QUANTIZATION_CONFIG_MAPPING[method]).parameters.values()
    return [
        each.name
        for each in settings
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD and each.name not in mapping
    ]
