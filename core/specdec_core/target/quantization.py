"""Which of transformers' quantisations to load a checkpoint with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.quantizers import AutoQuantizationConfig

from specdec_core.errors import ConfigError

EXAMPLE = "{'quant_method': 'bitsandbytes', 'load_in_4bit': True}"


def quantization_config(asked: Any, config: PretrainedConfig) -> Any:
    """What transformers' from_pretrained takes as quantization_config; None: the checkpoint says it all.

    asked: EngineConfig.quantization, a name, a mapping or one of transformers' own configurations. config: the
    checkpoint's. Raises ConfigError if the two differ, if the name is not known, or if it leaves something to choose.
    """
    own = getattr(config, "quantization_config", None)
    if asked is None:
        return None
    method = asked if isinstance(asked, str) else _method(asked)
    if method is None:
        raise ConfigError(
            f"quantization={asked!r} names no quant_method: give a name such as 'fp8', or transformers' quantization "
            f"config as a mapping or an object, such as {EXAMPLE}"
        )
    if own is not None and method != _method(own):
        raise ConfigError(
            f"quantization={method!r}, but the checkpoint is quantised with {_method(own)!r}: leave it out"
        )
    if isinstance(asked, str):
        return None if own is not None else _chosen({"quant_method": asked}, asked)
    return _chosen(asked, asked) if isinstance(asked, Mapping) else asked


def _method(given: Any) -> str | None:
    """quant_method of a mapping or an object; bitsandbytes may be written without."""
    values = given if isinstance(given, Mapping) else getattr(given, "__dict__", {})
    if values.get("load_in_8bit") or values.get("load_in_4bit"):
        return "bitsandbytes"
    method = values.get("quant_method")
    return None if method is None else str(getattr(method, "value", method))


def _chosen(mapping: Mapping[str, Any], asked: Any) -> Any:
    try:
        chosen = AutoQuantizationConfig.from_dict(dict(mapping))
        is_complete = getattr(chosen, "is_quantizable", lambda: True)()
    except Exception as error:  # each of transformers' configurations checks itself in its own way
        raise ConfigError(
            f"quantization={asked!r} is not known, or leaves something to choose: {type(error).__name__}: {error}. "
            f"Give transformers' quantization config as a mapping, such as {EXAMPLE}"
        ) from error
    if not is_complete:
        raise ConfigError(f"quantization={asked!r} does not say how many bits: give a mapping, such as {EXAMPLE}")
    return chosen
