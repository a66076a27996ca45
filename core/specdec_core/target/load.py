"""Find and load a checkpoint, and refuse what would not run faithfully."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from specdec_core.errors import CompatibilityError, ConfigError
from specdec_core.target.attention import IMPLEMENTATION

MODEL_GROUP = "specdec.models"
"""Entry points that name models which come inside a distribution: name -> a function that returns the folder."""


SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Chunked attention is like full attention up to its chunk size: `check_length` keeps it there."""


def resolve_model(model: str | Path) -> str:
    """The name of an embedded model ("tiny") becomes its folder; anything else, "./tiny" too, stays as it is."""
    for entry in entry_points(group=MODEL_GROUP):
        if entry.name == str(model):
            return str(entry.load()())
    return str(model)


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def find_device(device: str | None) -> torch.device:
    """The default one if None. Raises ConfigError if it cannot be had, or is neither a CPU nor a GPU of CUDA."""
    if device is None:
        return default_device()
    advice = "give cpu, or cuda where there is one"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # an unknown name, or a build of torch without it
        raise ConfigError(f"device={device!r} is not to be had here: {advice}") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r} is not supported: {advice}")
    return found


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


def refuse_revision(path: str, what: str, key: str, revision: str | None) -> None:
    """transformers drops the revision of a folder without a word."""
    if revision is not None and Path(path).is_dir():
        raise ConfigError(f"{key}={revision!r} is one of a repository, but {what}={path!r} is a folder: leave it out")


def load_config(path: str, *, trust_remote_code: bool, **revisions: str | None) -> PretrainedConfig:
    """The checkpoint's configuration, after the guards. Raises ConfigError or CompatibilityError.

    revisions: `revision` and `code_revision`, as in `EngineConfig`.
    """
    given = {key: value for key, value in revisions.items() if value is not None}
    refuse_revision(path, "model", "revision", given.get("revision"))
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **given)
    except Exception as error:  # whatever a broken config.json makes transformers raise
        embedded = sorted(entry.name for entry in entry_points(group=MODEL_GROUP))
        named = "".join(f", {key}={value!r}," for key, value in given.items())
        raise ConfigError(
            f"model={path!r}{named} cannot be read: {error}. Give a folder with a transformers checkpoint, a name on "
            f"the model hub, or an embedded model ({', '.join(embedded) or 'none is installed'})"
        ) from error
    text_config = config.get_text_config()
    _check_kind(config)
    unsupported = sorted(set(getattr(text_config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES)
    if unsupported:
        raise CompatibilityError(
            f"layer_types {unsupported} are not supported: allowed are {', '.join(sorted(SUPPORTED_LAYER_TYPES))}. "
            f"Use a model whose layers all attend to a key-value cache, without other states or sparse attention"
        )
    return config


def _check_kind(config: PretrainedConfig) -> None:
    """Refuse what is no causal language model."""
    if config.is_encoder_decoder:
        raise CompatibilityError(
            f"{config.model_type!r} is an encoder-decoder model: only causal language models (decoders) are supported"
        )
    auto_map = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and AutoModelForCausalLM.__name__ not in auto_map:
        raise CompatibilityError(
            f"transformers has no causal language model of type {config.model_type!r}: use a model of another family"
        )


def load_weights(
    path: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    attn_implementation: str | None = IMPLEMENTATION,
    **kwargs: Any,
) -> Any:
    """The model in evaluation mode, with its attention routed through the paged cache.

    attn_implementation: another one instead; None: as transformers chooses. kwargs: of transformers' from_pretrained.
    Those that are None are left out. Raises ConfigError if there are no weights, CompatibilityError if they are not
    this model's.
    """
    kwargs["attn_implementation"] = attn_implementation
    given = {key: value for key, value in kwargs.items() if value is not None}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, by name
            **given,
        )
    except KeyError as error:
        raise no_attention(config, error) from error
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


def no_attention(config: PretrainedConfig, error: KeyError) -> CompatibilityError:
    """What to raise when a model's class does not know `attention`, or whatever else, by its name."""
    if IMPLEMENTATION not in str(error):
        return CompatibilityError(
            f"transformers' {config.model_type!r} model has no {error}, which a value in config.json names: correct it"
        )
    return CompatibilityError(
        f"{config.model_type!r} models choose their attention from a list of their own, without {error}: they cannot "
        f"run on the paged cache. Use a model of another family"
    )
