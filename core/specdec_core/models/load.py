"""Loads a model's configuration from a checkpoint, and refuses unsupported models and damaged files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from attrs import fields, frozen
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from specdec_core.config.draft_options import DraftModelConfig
from specdec_core.config.engine import EngineConfig
from specdec_core.config.fields import shown
from specdec_core.contracts.target import TargetInfo
from specdec_core.errors import CompatibilityError, ConfigError, SpecdecError, reason
from specdec_core.models.attention import IMPLEMENTATION
from specdec_core.models.embedded import installed, resolve_model
from specdec_core.models.families import check_layer_types
from specdec_core.models.hub import require
from specdec_core.models.quantization import own_quantization, refuse_unknown_quantization
from specdec_core.models.sizes import unusable_sizes, wrong_sizes


@frozen(kw_only=True, eq=False)
class ModelSource:
    """Which checkpoint to load, and how. The attributes are options of the same names in `EngineConfig` and
    `DraftModelConfig`."""

    model: str | Path
    device: torch.device
    dtype: str | torch.dtype = "auto"
    max_model_len: int | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    code_revision: str | None = None
    quantization: Any = None
    enforce_eager: bool = False
    tensor_parallel_size: int = 1  # ranks that share each layer

    @classmethod
    def of_target(cls, config: EngineConfig, device: torch.device) -> ModelSource:
        names = {attribute.name for attribute in fields(cls)} - {"device"}
        return cls(device=device, **{name: getattr(config, name) for name in names})

    @classmethod
    def of_draft(cls, config: DraftModelConfig, target: TargetInfo) -> ModelSource:
        """The source of a draft model, with the target's dtype, device and trust_remote_code."""
        of_target = {name: getattr(target, name) for name in ("device", "dtype", "trust_remote_code")}
        names = ("model", "revision", "code_revision", "quantization", "enforce_eager")
        own = {name: getattr(config, name) for name in names}
        return cls(**of_target, **own, tensor_parallel_size=config.draft_tensor_parallel_size)

    @property
    def path(self) -> str:
        """The model's folder, or its name on the model hub. The name of an embedded model is replaced by its folder."""
        return resolve_model(self.model)

    @property
    def revisions(self) -> dict[str, str]:
        """Keyword arguments of transformers' from_pretrained: `revision` and `code_revision`, each only if it is not
        None."""
        both = {"revision": self.revision, "code_revision": self.code_revision}
        return {key: value for key, value in both.items() if value is not None}


def find_device(device: str | None) -> torch.device:
    """Parse the name of a device. None means "cuda" if there is a GPU, else "cpu"; "cuda" is the current GPU. Raises
    ConfigError if the device is not available, or if it is neither a CPU nor a CUDA GPU."""
    advice = "give 'cpu', or 'cuda' if there is a GPU"
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # an unknown name, or a build of torch without it
        if device.startswith("cuda") and torch.version.cuda is None and torch.version.hip is None:
            advice = "this build of torch has no CUDA. Give 'cpu', or install one with it"
        raise ConfigError(f"device={shown(device)} is not available here: {advice}") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={shown(device)} is not supported: {advice}")
    return found


def parse_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Parse a dtype: "auto" is bfloat16 if the device computes in it natively, else float32. Raises ConfigError for any
    other than float32, float16 and bfloat16."""
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype == "auto":
        if device.type == "cuda":
            is_native = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            is_native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if is_native else torch.float32
    if isinstance(dtype, torch.dtype) and dtype in names.values():
        return dtype
    if dtype not in names:
        raise ConfigError(f"dtype={shown(dtype)} is not known: give one of {['auto', *names]}")
    return names[str(dtype)]


def refuse_revision(path: str, what: str, key: str, revision: str | None) -> None:
    """Raise ConfigError if a revision is given for a folder, because transformers would ignore it silently.

    what, key: names of the options that hold the path and the revision, for the error.
    """
    if revision is not None and Path(path).is_dir():
        raise ConfigError(
            f"{key}={shown(revision)} is one of a repository, but {what}={path!r} is a folder: leave it out"
        )


def load_config(source: ModelSource) -> PretrainedConfig:
    """Load and check the checkpoint's configuration. Raises ConfigError if it cannot be read, CompatibilityError if the
    model is not supported."""
    path, given = source.path, source.revisions
    refuse_revision(path, "model", "revision", source.revision)
    try:
        require(path, "config.json", revision=source.revision)
        config = AutoConfig.from_pretrained(path, trust_remote_code=source.trust_remote_code, **given)
        own = own_quantization(config)
    except Exception as error:  # a broken config.json may raise anything
        written = _written(path, given)
        refuse_unknown_quantization(written.get("quantization_config"), path)
        why = _no_object(path) or wrong_sizes(written) or reason(error)
        embedded = sorted(each.name for each in installed() if each.status == "ok")
        named = "".join(f", {key}={shown(value)}," for key, value in given.items())
        raise ConfigError(
            f"model={path!r}{named} cannot be read: {why}. Give a folder with a transformers checkpoint, a "
            f"name on the model hub, or an embedded model ({', '.join(embedded) or 'none is installed'})"
        ) from error
    refuse_unknown_quantization(own, path)
    if config.is_encoder_decoder:
        raise CompatibilityError(
            f"{config.model_type!r} is an encoder-decoder model: only causal language models (decoders) are supported"
        )
    auto_map = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and AutoModelForCausalLM.__name__ not in auto_map:
        raise CompatibilityError(
            f"transformers has no causal language model of type {config.model_type!r}: use a model of another family"
        )
    if source.code_revision is not None and not auto_map:
        raise ConfigError(
            f"code_revision={shown(source.code_revision)} is of a checkpoint's own code, and {path!r} has none: leave "
            f"it out"
        )
    if why := unusable_sizes(config.get_text_config()):
        raise ConfigError(f"config.json of {path!r} is not valid: {why}. Correct it, or download or save it again")
    check_layer_types(config.get_text_config())
    return config


def _written(path: str, revisions: Mapping[str, str]) -> dict[str, Any]:
    """Read a config.json that transformers refused to load. Returns {} if the file cannot be read, or if it was not
    downloaded."""
    with suppress(OSError, TypeError, ValueError):
        written, _ = PretrainedConfig.get_config_dict(path, local_files_only=True, **revisions)
        return written if isinstance(written, dict) else {}
    return {}


def _no_object(path: str) -> str:
    """Return what a folder's config.json holds if that is JSON, but no object; else ""."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            return f"config.json holds {'null' if found is None else shown(found)}, not an object"
    return ""


def checked(source: ModelSource, config: PretrainedConfig, load: Callable[[], tuple[Any, Mapping[str, Any]]]) -> Any:
    """Load a model and refuse one of which tensors are missing or of another shape. Raises the errors of
    `weights.load_weights`.

    load: returns the model, and transformers' information about what it loaded.
    """
    path = source.path
    try:
        with _without_report_of_unused_tensors():
            model, info = load()
    except SpecdecError:
        raise
    except KeyError as error:
        if IMPLEMENTATION not in str(error) and not set(error.args) & _texts(config.to_dict()):
            raise ConfigError(f"the weights of {path!r} cannot be loaded: {error} is missing in their index") from error
        raise no_attention(config, error) from error
    except UnpicklingError as error:
        raise ConfigError(
            f"the weights of {path!r} hold more than tensors, so for safety they are not loaded: convert them to "
            f"safetensors"
        ) from error
    except Exception as error:  # a broken file may raise anything
        raise ConfigError(f"the weights of {path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    wrong = {kind: sorted(map(str, info[kind]))[:5] for kind in ("missing_keys", "mismatched_keys") if info[kind]}
    if wrong:
        raise CompatibilityError(
            f"the checkpoint {path!r} does not hold this model's weights: {wrong}. They would stay random; use a "
            f"complete checkpoint of {type(model).__name__}"
        )
    return model


@contextmanager
def _without_report_of_unused_tensors() -> Iterator[None]:
    """Drop transformers' report of tensors that the model does not use, such as those of a multi-token prediction
    module, which a proposer reads. A report that has other tensors, too, is still logged."""

    def is_needed(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return " LOAD REPORT" not in text or any(kind in text for kind in ("MISSING", "MISMATCH", "CONVERSION"))

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_needed)
    try:
        yield
    finally:
        logger.removeFilter(is_needed)


def _texts(values: Any) -> set[str]:
    """All texts in nested dicts and lists."""
    if isinstance(values, dict | list):
        return set().union(*map(_texts, values.values() if isinstance(values, dict) else values))
    return {values} if isinstance(values, str) else set()


def no_attention(config: PretrainedConfig, error: KeyError) -> CompatibilityError:
    """Turn transformers' KeyError about an unknown attention function into a CompatibilityError.

    The unknown name is either that of specdec's attention function or one that config.json contains.
    """
    if IMPLEMENTATION not in str(error):
        return CompatibilityError(
            f"transformers' {config.model_type!r} model has no {error}, which a value in config.json names: correct it"
        )
    return CompatibilityError(
        f"{config.model_type!r} models choose their attention from a list of their own, without {error}: they cannot "
        f"run on the paged cache. Use a model of another family"
    )
