"""Find and load a checkpoint, and refuse what would not run faithfully."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from specdec_core.errors import CompatibilityError, ConfigError
from specdec_core.target.attention import IMPLEMENTATION

MODEL_GROUP = "specdec.models"
"""Entry points that name models which come inside a distribution: name -> a function that returns the folder."""


SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def resolve_model(model: str | Path) -> str:
    """The name of an embedded model ("tiny") becomes its folder; anything else, "./tiny" too, stays as it is."""
    for entry in entry_points(group=MODEL_GROUP):
        if entry.name == str(model):
            return str(entry.load()())
    return str(model)


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes in it natively, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def parse_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype == "auto":
        return default_dtype(device)
    if isinstance(dtype, torch.dtype) and dtype in names.values():
        return dtype
    if dtype not in names:
        raise ConfigError(f"dtype={dtype!r} is not known: give one of {['auto', *names]}")
    return names[str(dtype)]


def load_config(path: str, *, trust_remote_code: bool) -> PretrainedConfig:
    """The checkpoint's configuration, after the guards. Raises ConfigError or CompatibilityError."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a broken config.json makes transformers raise
        embedded = sorted(entry.name for entry in entry_points(group=MODEL_GROUP))
        raise ConfigError(
            f"model={path!r} cannot be read: {error}. Give a folder with a transformers checkpoint, a name on the "
            f"model hub, or an embedded model ({', '.join(embedded) or 'none is installed'})"
        ) from error
    text_config = config.get_text_config()
    ropes = getattr(text_config, "rope_parameters", None) or {}
    for rope in [ropes, *(nested for nested in ropes.values() if isinstance(nested, dict))]:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            raise CompatibilityError(
                f"rope_type={rope['rope_type']!r} makes a request's positions depend on the longest request of the "
                f"batch, so its output would too. Use a checkpoint with another rope type"
            )
    unsupported = sorted(set(getattr(text_config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES)
    if unsupported:
        raise CompatibilityError(
            f"layer_types {unsupported} keep a state that is not supported: allowed are "
            f"{', '.join(sorted(SUPPORTED_LAYER_TYPES))}. Use a model whose layers all have a key-value cache"
        )
    return config


def load_weights(path: str, config: PretrainedConfig, dtype: torch.dtype, **kwargs: Any) -> Any:
    """The model in evaluation mode, with its attention routed through the paged cache.

    Raises ConfigError if there are no weights, CompatibilityError if they are not this model's.
    """
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION, output_loading_info=True, **kwargs
        )
    except KeyError as error:
        raise CompatibilityError(
            f"{config.model_type!r} models choose their attention from a list of their own, without {error}: they "
            f"cannot run on the paged cache. Use a model of another family"
        ) from error
    except UnpicklingError as error:
        raise ConfigError(
            f"the weights of {path!r} hold more than tensors, so for safety they are not loaded: convert them to "
            f"safetensors"
        ) from error
    except Exception as error:  # whatever a broken file makes its reader raise
        raise ConfigError(f"the weights of {path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    wrong = {kind: sorted(map(str, info[kind]))[:5] for kind in ("missing_keys", "mismatched_keys") if info[kind]}
    if wrong:
        raise CompatibilityError(
            f"the checkpoint {path!r} does not hold this model's weights: {wrong}. They would stay random; use a "
            f"complete checkpoint of {type(model).__name__}"
        )
    return model.eval().requires_grad_(False)
